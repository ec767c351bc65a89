"""From a PIL image to a tensor: the contract's transform names in their fixed order of application."""

from __future__ import annotations

from typing import Any

import torch
import torchvision.transforms as T
from torch import Tensor

from dear_plugin.engine.registry import check_name

INTERPOLATION = {
    "bilinear": T.InterpolationMode.BILINEAR,
    "bicubic": T.InterpolationMode.BICUBIC,
    "nearest": T.InterpolationMode.NEAREST,
}
POLICIES = {
    "imagenet_policy": T.AutoAugmentPolicy.IMAGENET,
    "cifar10_policy": T.AutoAugmentPolicy.CIFAR10,
    "svhn_policy": T.AutoAugmentPolicy.SVHN,
}
NAMES = (
    "random_flip",
    "random_resized_crop",
    "normalize",
    "instance_norm",
    "random_crop",
    "random_translation",
    "center_crop",
    "cutout",
    *POLICIES,
    "randaugment",
    "gaussian_noise",
    "colorjitter",
    "randomgrayscale",
    "gaussian_blur",
)

FIXED = ("normalize", "instance_norm", "center_crop")  # all others are random


class Cutout:
    """`count` squares of side `length`, placed anywhere, set to zero; cut at the border."""

    def __init__(self, count: int, length: int) -> None:
        self.count, self.length = count, length

    def __call__(self, image: Tensor) -> Tensor:
        image = image.clone()
        height, width = image.shape[-2:]
        for _ in range(self.count):
            y, x = (int(torch.randint(size, ())) for size in (height, width))
            half = self.length // 2
            image[..., max(0, y - half) : y + half, max(0, x - half) : x + half] = 0
        return image


class GaussianNoise:
    """Adds noise N(mean, std) with probability a half."""

    def __init__(self, mean: float, std: float) -> None:
        self.mean, self.std = mean, std

    def __call__(self, image: Tensor) -> Tensor:
        return image + torch.randn_like(image) * self.std + self.mean if torch.rand(()) < 0.5 else image


def instance_norm(image: Tensor) -> Tensor:
    """Mean 0 and deviation 1 in each channel of one image."""
    mean, std = image.mean((1, 2), keepdim=True), image.std((1, 2), keepdim=True)
    return (image - mean) / (std + 1e-8)


def random_translation(size: tuple[int, int]) -> T.RandomApply:
    """With probability a half: enlarge by an eighth, then crop back."""
    larger = [round(side * 1.125) for side in size]
    return T.RandomApply([T.Resize(larger, T.InterpolationMode.BILINEAR), T.RandomCrop(size)], p=0.5)


def build_transform(cfg: Any, is_train: bool = True, choices: Any = None) -> T.Compose | None:
    """The train or the test transform of INPUT; the order of the names in INPUT.TRANSFORMS has no effect."""
    if cfg.INPUT.NO_TRANSFORM:
        return None
    names = cfg.INPUT.TRANSFORMS if choices is None else choices
    for name in names:
        check_name(name, NAMES, what="transform", key="INPUT.TRANSFORMS")
    check_name(cfg.INPUT.INTERPOLATION, INTERPOLATION, what="interpolation", key="INPUT.INTERPOLATION")
    steps = train_steps(cfg.INPUT, set(names)) if is_train else test_steps(cfg.INPUT, set(names))
    if cfg.VERBOSE:
        print(f"Building transform_{'train' if is_train else 'test'}")
        for step in steps:
            print(f"+ {getattr(step, '__name__', step)}")
    return T.Compose(steps)


def train_steps(settings: Any, names: set[str]) -> list[Any]:
    """The steps of training in their order; `settings` is the INPUT node."""
    size, interpolation = tuple(settings.SIZE), INTERPOLATION[settings.INTERPOLATION]
    jitter = (settings.COLORJITTER_B, settings.COLORJITTER_C, settings.COLORJITTER_S, settings.COLORJITTER_H)
    steps: list[Any] = []
    if not names & {"random_crop", "random_resized_crop"}:
        steps.append(T.Resize(size, interpolation))  # both sides: the aspect is lost
    on_image = {
        "random_translation": lambda: random_translation(size),
        "random_crop": lambda: T.RandomCrop(size, padding=settings.CROP_PADDING),
        "random_resized_crop": lambda: T.RandomResizedCrop(
            size, tuple(settings.RRCROP_SCALE), interpolation=interpolation
        ),
        "random_flip": T.RandomHorizontalFlip,
        **{name: lambda policy=policy: T.AutoAugment(policy) for name, policy in POLICIES.items()},
        "randaugment": lambda: T.RandAugment(settings.RANDAUGMENT_N, settings.RANDAUGMENT_M),
        "colorjitter": lambda: T.ColorJitter(*jitter),
        "randomgrayscale": lambda: T.RandomGrayscale(settings.RGS_P),
        "gaussian_blur": lambda: T.RandomApply([T.GaussianBlur(settings.GB_K)], p=settings.GB_P),
    }
    steps += [make() for name, make in on_image.items() if name in names]
    steps.append(T.ToTensor())
    if "cutout" in names:
        steps.append(Cutout(settings.CUTOUT_N, settings.CUTOUT_LEN))
    steps += normalize_step(settings, names)
    if "gaussian_noise" in names:
        steps.append(GaussianNoise(settings.GN_MEAN, settings.GN_STD))
    return steps + [instance_norm] * ("instance_norm" in names)


def test_steps(settings: Any, names: set[str]) -> list[Any]:
    """Shorter side to the size, centre crop: CLIP's own preprocessing when the settings are CLIP's."""
    size, interpolation = tuple(settings.SIZE), INTERPOLATION[settings.INTERPOLATION]
    steps = [T.Resize(max(size), interpolation), T.CenterCrop(size), T.ToTensor(), *normalize_step(settings, names)]
    return steps + [instance_norm] * ("instance_norm" in names)


def normalize_step(settings: Any, names: set[str]) -> list[T.Normalize]:
    return [T.Normalize(list(settings.PIXEL_MEAN), list(settings.PIXEL_STD))] if "normalize" in names else []


def plain_steps(settings: Any) -> list[Any]:
    """The steps of `img0`: resized to the exact size, no crop, no augmentation."""
    names = set(settings.TRANSFORMS)
    return [
        T.Resize(tuple(settings.SIZE), INTERPOLATION[settings.INTERPOLATION]),
        T.ToTensor(),
        *normalize_step(settings, names),
    ]
