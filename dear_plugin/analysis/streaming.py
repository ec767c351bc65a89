"""Pictures in, moments of the heads' contributions out: in batches, counting unreadable files, and resumable."""

import hashlib
import json
import os
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

import numpy as np
import torch
from torch import Tensor

from dear_plugin.analysis.contributions import head_contributions
from dear_plugin.analysis.textspan import HeadMoments
from dear_plugin.towers import VisionTower

EXTENSIONS = (".jpg", ".jpeg", ".png", ".bmp", ".webp", ".tif", ".tiff", ".gif", ".ppm")
Progress = Callable[[Iterable, str], Iterable]


class Pictures(Protocol):
    """Pictures by position: uint8 [R, R, 3], or an error where one cannot be read."""

    size: int

    def __len__(self) -> int: ...

    def name(self, index: int) -> str: ...

    def read(self, index: int) -> np.ndarray: ...


class FolderPictures:
    """All pictures below a folder that match a pattern, sorted by path: resized, centre cropped, RGB."""

    def __init__(self, folder: Path, size: int, *, pattern: str = "*", limit: int | None = None):
        folder = Path(folder)
        if not folder.is_dir():
            raise FileNotFoundError(f"{folder} is no folder: --images wants a folder of pictures.")
        paths = sorted(p for p in folder.rglob(pattern) if p.suffix.lower() in EXTENSIONS and p.is_file())
        if not paths:
            raise ValueError(f"no pictures below {folder} match {pattern!r} ({', '.join(EXTENSIONS)}).")
        self.folder, self.size = folder, size
        self.paths = _evenly(paths, limit)

    def __len__(self) -> int:
        return len(self.paths)

    def name(self, index: int) -> str:
        return self.paths[index].relative_to(self.folder).as_posix()

    def read(self, index: int) -> np.ndarray:
        from PIL import Image
        from torchvision.transforms.v2 import functional as transforms

        with Image.open(self.paths[index]) as image:
            image = image.convert("RGB")
        image = transforms.resize(image, [self.size], interpolation=transforms.InterpolationMode.BICUBIC)
        return np.asarray(transforms.center_crop(image, [self.size]))


class ArrayPictures:
    """Pictures that are in memory already, uint8 [N, R, R, 3]."""

    def __init__(self, pixels: np.ndarray):
        if pixels.ndim != 4 or pixels.shape[3] != 3 or pixels.shape[1] != pixels.shape[2] or pixels.dtype != np.uint8:
            raise ValueError(f"pictures must be uint8 [N, R, R, 3], got {pixels.dtype} {list(pixels.shape)}.")
        self.pixels, self.size = pixels, pixels.shape[1]

    def __len__(self) -> int:
        return len(self.pixels)

    def name(self, index: int) -> str:
        return f"picture {index}"

    def read(self, index: int) -> np.ndarray:
        return self.pixels[index]


@dataclass
class Collected:
    """What a pass over the pictures leaves beside the moments."""

    position: int = 0  # pictures looked at
    digests: list[str] = field(default_factory=list)  # sha256 of the pixels of each picture used, in order
    skipped: list[str] = field(default_factory=list)  # names of unreadable files

    def image_set_hash(self) -> str:
        return hashlib.sha256("\n".join(self.digests).encode()).hexdigest()


@dataclass(frozen=True)
class Preparation:
    """From uint8 pixels to a tower's input."""

    mean: tuple[float, ...]
    std: tuple[float, ...]
    device: torch.device | str = "cpu"

    def __call__(self, pixels: Sequence[np.ndarray]) -> Tensor:
        """[N][R, R, 3] uint8 -> [N, 3, R, R]"""
        x = torch.from_numpy(np.stack(pixels)).to(self.device).permute(0, 3, 1, 2).float() / 255.0
        mean, std = (torch.tensor(v, device=self.device)[:, None, None] for v in (self.mean, self.std))
        return (x - mean) / std


def pixel_digest(pixels: np.ndarray) -> str:
    """sha256 of a picture's pixels: the same picture under another file name is the same picture."""
    return hashlib.sha256(str(pixels.shape).encode() + np.ascontiguousarray(pixels).tobytes()).hexdigest()


def read_batch(pictures: Pictures, indices: Iterable[int]) -> tuple[list[int], list[np.ndarray], list[str]]:
    """(positions read, their pixels, names of those that cannot be read)."""
    read, pixels, skipped = [], [], []
    for index in indices:
        try:
            pixels.append(pictures.read(index))
            read.append(index)
        except (OSError, SyntaxError, ValueError):  # what Pillow raises for a damaged file
            skipped.append(pictures.name(index))
    return read, pixels, skipped


def collect_moments(
    tower: VisionTower, pictures: Pictures, moments: HeadMoments, *, layers: Sequence[int], prepare: Preparation,
    batch_size: int = 64, state: Path | None = None, key: str = "", resume: bool = False, save_every_s: float = 120.0,
    progress: Progress | None = None,
) -> Collected:
    """Add the contributions of all pictures to `moments`, a batch (or less, where there are few pictures) to each
    block in turn, so that every block holds pictures from all over the list.

    With `state`, the pass is saved now and then under `key` (what the result depends on) and `resume` goes on from
    there. The file stays: what is made of the moments can be interrupted too, so the caller removes it.
    """
    done = _restore(state, key, moments) if resume and state is not None else Collected()
    starts = range(done.position, len(pictures), batch_size)
    run = max(1, min(batch_size, len(pictures) // moments.blocks))  # pictures in a row that go to one block
    saved_at = time.monotonic()
    for start in (progress or _silent)(starts, "contributions"):
        read, pixels, skipped = read_batch(pictures, range(start, min(start + batch_size, len(pictures))))
        if pixels:
            heads = head_contributions(tower, prepare(pixels), layers).heads
            blocks = [index // run % moments.blocks for index in read]
            for block in dict.fromkeys(blocks):
                moments.add(heads[[k for k, b in enumerate(blocks) if b == block]], block)
        done.digests += [pixel_digest(p) for p in pixels]
        done.skipped += skipped
        done.position = min(start + batch_size, len(pictures))
        if state is not None and time.monotonic() - saved_at >= save_every_s:
            _save(state, key, moments, done)
            saved_at = time.monotonic()
    if not done.digests:
        raise ValueError(f"none of the {len(pictures)} pictures can be read, the first: {pictures.name(0)}.")
    return done


def _save(path: Path, key: str, moments: HeadMoments, done: Collected) -> None:
    from safetensors.torch import save_file

    partial = path.with_name(f".{path.name}.{os.getpid()}.partial")
    facts = {"key": key, "position": done.position, "digests": done.digests, "skipped": done.skipped}
    tensors = {name: value.cpu() for name, value in moments.state_dict().items()}
    save_file(tensors, partial, metadata={"pass": json.dumps(facts)})
    partial.replace(path)


def _restore(path: Path, key: str, moments: HeadMoments) -> Collected:
    if not path.is_file():
        return Collected()
    from safetensors import SafetensorError, safe_open

    try:
        with safe_open(path, framework="pt") as file:
            facts = json.loads(file.metadata()["pass"])
            if facts["key"] != key:
                raise ValueError(
                    f"{path} was saved by another analysis (other weights, pictures, layers or batch size): give "
                    "another --out, or start anew without --resume."
                )
            moments.load_state_dict({name: file.get_tensor(name) for name in file.keys()})  # noqa: SIM118
    except (SafetensorError, KeyError, TypeError) as error:
        raise ValueError(f"{path} is damaged ({error}): remove it and start anew.") from None
    return Collected(facts["position"], facts["digests"], facts["skipped"])


def _silent(items: Iterable, _: str) -> Iterable:
    return items


def _evenly(items: list, limit: int | None) -> list:
    """At most `limit` items, spread evenly over the list."""
    if limit is None or limit >= len(items):
        return items
    return [items[i * len(items) // limit] for i in range(limit)]
