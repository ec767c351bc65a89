"""Prompts that are set anew before each of the first layers of a tower: what MaPLe and PromptSRC share."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from dear_plugin.encoder import read_with_tokens
from dear_plugin.engine.distributed import by_classes
from dear_plugin.tokens import TokenSchedule
from dear_plugin.towers import TextTower, VisionTower, read_plain

# Text prompts overwrite the words after the start token; vision prompts follow the patches.
IN_TEXT = TokenSchedule(first_layer=0, position=1, then="replace", in_place=True)
IN_VISION = TokenSchedule(first_layer=0, position=None, then="replace")
MOST_WORDS = 4  # more vectors than this start at random whatever CTX_INIT says, as published


class ClassSentences(NamedTuple):
    """One sentence a class, ready for the first layer; nothing in it is learned, so it is made once."""

    sentences: list[str]
    hidden: Tensor  # [C, L, D], positions added, nothing after the last end token (exact: the mask is causal)
    end: Tensor  # [C], position of the end token


def class_sentences(
    tower: TextTower, tokenize: Callable[[list[str]], Tensor], classnames: list[str], *, words: str, count: int
) -> ClassSentences:
    """`<words> <name>.` for each class; without usable words `count` times X stands for them."""
    words = words.replace("_", " ").strip()
    prefix = words if words and count <= MOST_WORDS else " ".join(["X"] * count)
    sentences = [f"{prefix} {name}." for name in classnames]
    ids = tokenize(sentences)
    end = tower.end_index(ids)
    with torch.no_grad():
        hidden = tower.embed(ids[:, : int(end.max()) + 1])
    return ClassSentences(sentences, hidden, end)


def starting_vectors(
    tower: TextTower, tokenize: Callable[[list[str]], Tensor], *, words: str, count: int, key: str
) -> Tensor:
    """[count, D] in fp32: the embeddings of the first `count` tokens of `words`, else drawn from N(0, 0.02)."""
    if count < 1:
        raise ValueError(f"{key} is {count}; wanted 1 or more context vectors")
    words = words.replace("_", " ").strip()
    if not words or count > MOST_WORDS:
        return 0.02 * torch.randn(count, tower.width)
    ids = tokenize([words])
    known = int(tower.end_index(ids)[0]) - 1
    if known < count:
        raise ValueError(f"{key} is {count}, but the initial words {words!r} have {known} tokens: give more words, or "
                         "none for a random start")
    with torch.no_grad():
        return tower.token_embedding(ids[:, 1 : 1 + count])[0].float().cpu()


def check_depth(depth: int, tower: Any, *, key: str, least: int = 1) -> None:
    """The number of layers with prompts of their own must exist in the tower."""
    if not least <= depth <= tower.layers:
        raise ValueError(f"{key} is {depth}; wanted {least} to {tower.layers}, the layers of the {tower.where}")


def prompted_text(tower: TextTower, text: ClassSentences, prompts: Tensor) -> Tensor:
    """Text features [C, E] with prompts [J, K, D]; the first row gets the positions of the words it stands for."""
    positions = tower.positional_embedding[1 : 1 + prompts.shape[1]].detach().to(prompts.dtype)
    rows = torch.cat([prompts[:1] + positions, prompts[1:]])

    def features(part: slice) -> Tensor:
        x, _ = read_with_tokens(tower, text.hidden[part], rows, IN_TEXT, read=text.end[part], outputs=False)
        return tower.project(x)

    return by_classes(features, len(text.end))


def prompted_image(tower: VisionTower, x: Tensor, prompts: Tensor | None) -> Tensor:
    """Image features [N, E] of x = tower.embed(images) with prompts [J, K, D]; the first row passes ln_pre too."""
    if prompts is None:
        return tower.project(read_plain(tower, x, 0))
    rows = torch.cat([tower.ln_pre(prompts[:1]), prompts[1:]])
    x, _ = read_with_tokens(tower, x, rows, IN_VISION, read=0, outputs=False)
    return tower.project(x)
