"""What the trainers' tests run on: a random backbone file in OpenAI's layout, a small data set of generated PNGs."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import torch
from PIL import Image

from dear_plugin.engine import build_trainer, set_random_seed
from scripts import train as train_script

NAMES = ("blue_stripes", "dotted", "grainy", "red_checks", "zebra_like")  # sorted: base are the first 3, new the last 2
TRAIN, TEST = 2, 3  # images a class
SIZE, LAYERS = 32, 3

# Trainer -> (overrides that make it fit 3 layers, number of trained parameters in this geometry). Widths: vision 128,
# text 64, embedding 32.
METHODS: dict[str, tuple[list[Any], int]] = {
    "CoOp": ([], 4 * 64),
    "CoCoOp": (["TRAINER.COCOOP.CHUNK", 5], 4 * 64 + (32 * 2 + 2) + (2 * 64 + 64)),
    "MaPLe": (["TRAINER.MAPLE.PROMPT_DEPTH", 2], 2 * (2 * 64 + 64 * 128 + 128)),
    "PromptSRC": (
        ["TRAINER.PROMPTSRC.PROMPT_DEPTH_TEXT", 2, "TRAINER.PROMPTSRC.PROMPT_DEPTH_VISION", 3,
         "TRAINER.PROMPTSRC.GPA_MEAN", 2, "TRAINER.PROMPTSRC.TEACHER_TEMPLATES", "['a {}.', 'the {}.']"],
        2 * 4 * 64 + 3 * 4 * 128,
    ),
    "MMRL": (
        ["TRAINER.MMRL.REP_LAYERS", [2, 3], "TRAINER.MMRL.TEXT_REP_LAYERS", [3], "TRAINER.MMRL.REP_DIM", 16],
        5 * 16 + 2 * (16 * 128 + 128) + (16 * 64 + 64) + 128 * 32,
    ),
    "DeAR": (
        ["TRAINER.DEAR.ROLES", "all-mixed", "TRAINER.DEAR.START_LAYER", 2, "TRAINER.DEAR.LATENT_WIDTH", 16],
        5 * 16 + 16 * 128 + 16 * 64 + 128 * 32 + 6,
    ),
}


def random_openai_state(
    *, layers: int = LAYERS, width: int = 128, text_width: int = 64, embed: int = 32, size: int = SIZE, patch: int = 16,
    seed: int = 0,
) -> dict[str, torch.Tensor]:
    """A random CLIP under OpenAI's keys; all tensors are moved, so that a swapped or dropped one shows."""
    draw = torch.Generator().manual_seed(seed)

    def randn(*shape: int, std: float, mean: float = 0.0) -> torch.Tensor:
        return mean + std * torch.randn(*shape, generator=draw)

    state = {
        "token_embedding.weight": randn(49408, text_width, std=0.1),
        "positional_embedding": randn(77, text_width, std=0.1),
        "ln_final.weight": randn(text_width, std=0.1, mean=1.0), "ln_final.bias": randn(text_width, std=0.1),
        "text_projection": randn(text_width, embed, std=text_width**-0.5), "logit_scale": torch.tensor(3.0),
        "visual.conv1.weight": randn(width, 3, patch, patch, std=0.03), "visual.class_embedding": randn(width, std=0.1),
        "visual.positional_embedding": randn((size // patch) ** 2 + 1, width, std=0.1),
        "visual.proj": randn(width, embed, std=width**-0.5),
    }
    for name in ("visual.ln_pre", "visual.ln_post"):
        state |= {f"{name}.weight": randn(width, std=0.1, mean=1.0), f"{name}.bias": randn(width, std=0.1)}
    for prefix, wide in (("visual.transformer", width), ("transformer", text_width)):
        for layer in range(layers):
            block = f"{prefix}.resblocks.{layer}"
            for norm in ("ln_1", "ln_2"):
                state |= {f"{block}.{norm}.weight": randn(wide, std=0.1, mean=1.0),
                          f"{block}.{norm}.bias": randn(wide, std=0.1)}
            for name, rows, columns in (("attn.in_proj_", 3 * wide, wide), ("attn.out_proj.", wide, wide),
                                        ("mlp.c_fc.", 4 * wide, wide), ("mlp.c_proj.", wide, 4 * wide)):
                state |= {f"{block}.{name}weight": randn(rows, columns, std=0.7 * columns**-0.5),
                          f"{block}.{name}bias": randn(rows, std=0.1)}
    return state


def write_data(root: Path, names: tuple[str, ...] = NAMES) -> Path:
    """<root>/dtd in CoOp's layout: images/<class>/<n>.png and the split file."""
    draw = torch.Generator().manual_seed(5)
    split: dict[str, list] = {"train": [], "val": [], "test": []}
    for label, name in enumerate(names):
        (root / "dtd" / "images" / name).mkdir(parents=True)
        for number in range(TRAIN + TEST):
            level = torch.tensor([60 + 35 * (label % 5), 200 - 30 * (label % 5), 40 + 20 * (label % 5)])
            pixels = (level + 30 * torch.randn(SIZE + 4, SIZE + 4, 3, generator=draw)).clamp(0, 255).byte()
            Image.fromarray(pixels.numpy()).save(root / "dtd" / "images" / name / f"{number}.png")
            split["train" if number < TRAIN else "test"].append([f"{name}/{number}.png", label, name])
    split["val"] = split["test"]
    (root / "dtd" / "split_zhou_DescribableTextures.json").write_text(json.dumps(split), encoding="utf-8")
    return root


def arguments(
    trainer: str, *, root: Path, backbone: Path, out: Path, classes: str = "base", flags: tuple = (),
    extra: list[Any] | None = None, **opts: Any,
) -> list[str]:
    """A call of scripts/train.py with the method's tiny.yaml; `extra` replaces METHODS' pairs."""
    values = {
        "INPUT.SIZE": (SIZE, SIZE), "DATALOADER.TRAIN_X.BATCH_SIZE": 3, "DATALOADER.TEST.BATCH_SIZE": 4,
        "DATALOADER.NUM_WORKERS": 0, "OPTIM.MAX_EPOCH": 2, "OPTIM.LR": 0.01, "OPTIM.WARMUP_CONS_LR": 0.005,
        "DATASET.NUM_SHOTS": TRAIN, "DATASET.SUBSAMPLE_CLASSES": classes, "USE_CUDA": False, "VERBOSE": False,
    }
    extra = METHODS.get(trainer, ([], 0))[0] if extra is None else extra
    pairs = [part for key, value in (values | opts).items() for part in (key, value)]
    return [
        "--root", str(root), "--output-dir", str(out), "--seed", "1", "--trainer", trainer, "--backbone", str(backbone),
        "--dataset-config-file", "configs/datasets/dtd.yaml", "--config-file", f"configs/trainers/{trainer}/tiny.yaml",
        *flags, *map(str, pairs), *map(str, extra),
    ]


def config(trainer: str, **options: Any) -> Any:
    """The frozen config of the call that `arguments` describes."""
    return train_script.build_config(train_script.parse_arguments(arguments(trainer, **options)))


def build(cfg):
    """The trainer of a config, as scripts/train.py makes it."""
    train_script.check_names(cfg)
    set_random_seed(cfg.SEED)
    return build_trainer(cfg)


def trained_state(trainer) -> dict[str, torch.Tensor]:
    """Copies of all registered tensors, by model and name."""
    return {f"{name}.{key}": value.clone() for name, model in trainer._models.items()
            for key, value in model.state_dict().items()}


def same(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor]) -> bool:
    return a.keys() == b.keys() and all(torch.equal(a[key], b[key]) for key in a)


def distance(one: dict[str, torch.Tensor], two: dict[str, torch.Tensor]) -> float:
    """Largest difference of two trained states, relative to the largest entry of its tensor.

    One entry in a thousand is left out: AdamW turns the rounding error of a gradient near zero into a step as large as
    the learning rate.
    """
    if one.keys() != two.keys():
        raise ValueError(f"not the same tensors: {sorted(one.keys() ^ two.keys())}")
    rows = [((value - two[key]).abs() / value.abs().max().clamp(min=1e-3)).flatten() for key, value in one.items()]
    return max(float(row.kthvalue(math.ceil(0.999 * len(row))).values) for row in rows)
