"""TEXTSPAN: the sentences whose directions explain most of what a head writes (Gandelsman et al., ICLR 2024).

The greedy choice needs the images only through the mean and the second moments of a head's contributions, so images are
streamed: memory is blocks * S * H * E * E numbers in float64, whatever the number of images (ViT-B/16, last four
layers, 16 blocks: 1.5 GiB). Nothing is rounded to half precision on the way.
"""

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

SPANS = ("centred", "raw")
# A sentence whose remaining length (squared, relative) is below this lies in the span of those chosen before it.
_EXHAUSTED = 1e-9


class HeadMoments:
    """Running sums of contributions [N, S, H, E], kept in a few blocks of images so that images can be resampled."""

    def __init__(self, layers: int, heads: int, embed: int, *, blocks: int = 16, device: torch.device | str = "cpu"):
        if blocks < 1:
            raise ValueError(f"blocks must be at least 1, got {blocks}.")
        options = {"dtype": torch.float64, "device": device}
        self.counts = torch.zeros(blocks, **options)  # [G]
        self.sums = torch.zeros(blocks, layers, heads, embed, **options)  # [G, S, H, E]
        self.seconds = torch.zeros(blocks, layers, heads, embed, embed, **options)  # [G, S, H, E, E], X^T X

    @property
    def blocks(self) -> int:
        return len(self.counts)

    @property
    def images(self) -> int:
        return int(self.counts.sum().item())

    @property
    def nbytes(self) -> int:
        return sum(value.nbytes for value in self.state_dict().values())

    def add(self, heads: Tensor, block: int) -> None:
        """Add contributions [N, S, H, E] of N images to a block."""
        if heads.shape[1:] != self.sums.shape[1:]:
            wanted = ", ".join(map(str, self.sums.shape[1:]))
            raise ValueError(f"contributions are {list(heads.shape)}, wanted [N, {wanted}].")
        x = heads.to(self.sums)
        self.counts[block] += len(x)
        self.sums[block] += x.sum(0)
        by_head = x.permute(1, 2, 0, 3)  # [S, H, N, E]
        self.seconds[block] += by_head.transpose(-2, -1) @ by_head

    def total(self, weights: Tensor | None = None) -> "Moments":
        """Mean and second moments over all images; `weights` [G] counts each block that many times."""
        weights = torch.ones_like(self.counts) if weights is None else weights.to(self.counts)
        count = (weights * self.counts).sum()
        if count < 2:
            raise ValueError(f"variance over {int(count)} images says nothing: give at least 2 images.")
        mean = torch.einsum("g,gshe->she", weights, self.sums) / count
        return Moments(count, mean, torch.einsum("g,gshef->shef", weights, self.seconds) / count)

    def state_dict(self) -> dict[str, Tensor]:
        return {"counts": self.counts, "sums": self.sums, "seconds": self.seconds}

    def load_state_dict(self, state: dict[str, Tensor]) -> None:
        for name, value in self.state_dict().items():
            if name not in state or state[name].shape != value.shape:
                raise ValueError(f"saved moments do not fit: {name} should be {list(value.shape)}.")
            value.copy_(state[name])


class Moments(NamedTuple):
    """What TEXTSPAN needs of the images, for all heads."""

    count: Tensor  # []
    mean: Tensor  # [S, H, E]
    second: Tensor  # [S, H, E, E], mean of x x^T

    def covariance(self) -> Tensor:
        """[S, H, E, E]"""
        return self.second - self.mean[..., :, None] * self.mean[..., None, :]


class Description(NamedTuple):
    """The sentences of one head in the order of choice."""

    indices: tuple[int, ...]  # positions in the pool
    shares: tuple[float, ...]  # share of the head's variance that each one's own direction explains, in [0, 1]
    variance: float  # the head's variance, summed over E


def describe(covariance: Tensor, text: Tensor, *, n: int, rank: int, second: Tensor | None = None) -> Description:
    """Greedy choice of n sentences for one head.

    covariance [E, E] of its contributions; text [M, E] features of the pool. Sentences are first projected onto the
    head's `rank` strongest directions: of the covariance, or of the second moments about zero, `second` [E, E], where
    given (the published code takes the span before the mean is removed). Each step takes the sentence with the largest
    variance along its remaining vector, then removes that direction from the contributions and from all sentences.
    Of equal sentences the first is taken.
    """
    _check(covariance, text, n, rank)
    covariance, text = covariance.double(), text.to(covariance.device).double()
    span = _strongest(covariance if second is None else second.double(), rank)  # [E, r]
    # All that follows happens inside the span, so r numbers a sentence are enough: exact, and E/r times faster.
    left = span.T @ covariance @ span  # [r, r]
    sentences = text @ span  # [M, r]
    least = _EXHAUSTED * sentences.square().sum(1)
    total = covariance.diagonal().sum().item()
    indices, shares = [], []
    for _ in range(n):
        lengths = sentences.square().sum(1)
        scores = ((sentences @ left) * sentences).sum(1).masked_fill(lengths <= least, -1.0)
        best = int(scores.argmax())
        if scores[best] < 0:
            break  # every sentence lies in the span of those chosen
        direction = sentences[best] / lengths[best].sqrt()
        explained = (direction @ left @ direction).clamp(min=0.0).item()
        indices.append(best)
        shares.append(explained / total if total > 0 else 0.0)
        keep = torch.eye(len(direction), dtype=left.dtype, device=left.device) - torch.outer(direction, direction)
        left = keep @ left @ keep
        sentences = sentences - torch.outer(sentences @ direction, direction)
    return Description(tuple(indices), tuple(shares), total)


def describe_heads(
    moments: Moments, text: Tensor, *, n: int, rank: int, span: str = "centred"
) -> list[list[Description]]:
    """`describe` for each head: [S][H]."""
    if span not in SPANS:
        raise ValueError(f"span must be one of {', '.join(SPANS)}, got {span!r}.")
    covariance = moments.covariance()
    layers, heads = covariance.shape[:2]
    return [
        [
            describe(covariance[s, h], text, n=n, rank=rank, second=moments.second[s, h] if span == "raw" else None)
            for h in range(heads)
        ]
        for s in range(layers)
    ]


def resampled_weights(blocks: int, *, draws: int, seed: int) -> Tensor:
    """How often each block of images counts in each bootstrap draw, [draws, G]; every row sums to G."""
    generator = torch.Generator().manual_seed(seed)
    picks = torch.randint(0, blocks, (draws, blocks), generator=generator)
    return torch.stack([torch.bincount(row, minlength=blocks) for row in picks]).double()


def _check(covariance: Tensor, text: Tensor, n: int, rank: int) -> None:
    embed = covariance.shape[-1]
    if covariance.shape != (embed, embed) or text.dim() != 2 or text.shape[1] != embed:
        got = f"covariance is {list(covariance.shape)} and text {list(text.shape)}"
        raise ValueError(f"{got}: wanted [E, E] and [M, E].")
    if not torch.isfinite(text).all() or not torch.isfinite(covariance).all():
        raise ValueError("contributions or text features are not finite: check the weights of the backbone.")
    if not 1 <= rank <= embed:
        raise ValueError(f"rank must lie between 1 and the embedding's {embed}, got {rank}.")
    if not 1 <= n <= rank:
        raise ValueError(f"n must lie between 1 and the rank ({rank}): {n} sentences cannot be independent in it.")
    if len(text) < n:
        raise ValueError(f"the pool has {len(text)} sentences, fewer than n = {n}: give a larger pool or a smaller n.")


def _strongest(symmetric: Tensor, rank: int) -> Tensor:
    """[E, r]: orthonormal directions of the largest eigenvalues."""
    return torch.linalg.eigh(symmetric).eigenvectors[:, -rank:]


def shared_descriptions(described: Sequence[tuple[tuple[int, int], tuple[int, ...]]], *, least: float = 0.5) -> list:
    """Pairs of heads that share at least that part of their sentences: [((l, h), (l, h), share)], most alike first."""
    pairs = []
    for i, (first, ours) in enumerate(described):
        for second, theirs in described[i + 1 :]:
            share = len(set(ours) & set(theirs)) / max(1, min(len(ours), len(theirs)))
            if share >= least:
                pairs.append((first, second, share))
    return sorted(pairs, key=lambda pair: (-pair[2], pair[0], pair[1]))
