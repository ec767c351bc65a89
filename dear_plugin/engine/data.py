"""Items, data sets and their loaders, as the contract names them."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torchvision.transforms as T
from torch.utils.data import BatchSampler, DataLoader, Dataset, Sampler, default_collate

from dear_plugin.engine import distributed
from dear_plugin.engine.config import has_key
from dear_plugin.engine.images import check_images, read_image
from dear_plugin.engine.registry import build_dataset
from dear_plugin.engine.samplers import build_sampler
from dear_plugin.engine.system import seeded
from dear_plugin.engine.transforms import build_transform, plain_steps


@dataclass(frozen=True)
class Datum:
    """One image of a list. Whether the file exists is checked for a whole list at once (images.py)."""

    impath: str = ""
    label: int = 0
    domain: int = 0
    classname: str = ""


class DatasetBase:
    """Lists of Datum, and the class names found in train_x."""

    dataset_dir = ""
    domains: tuple[str, ...] = ()

    def __init__(
        self,
        train_x: Sequence[Datum] = (),
        train_u: Sequence[Datum] = (),
        val: Sequence[Datum] = (),
        test: Sequence[Datum] = (),
    ) -> None:
        self._train_x, self._train_u, self._val, self._test = (
            list(items or ()) for items in (train_x, train_u, val, test)
        )
        if not self._train_x:
            raise ValueError(f"data set {type(self).__name__} has no training images; the class names come from them")
        found = {item.label: item.classname for item in self._train_x}
        self._lab2cname = {label: found[label] for label in sorted(found)}

    @property
    def train_x(self) -> list[Datum]:
        return self._train_x

    @property
    def train_u(self) -> list[Datum]:
        return self._train_u

    @property
    def val(self) -> list[Datum]:
        return self._val

    @property
    def test(self) -> list[Datum]:
        return self._test

    @property
    def lab2cname(self) -> dict[int, str]:
        return self._lab2cname

    @property
    def classnames(self) -> list[str]:
        """Names in label order."""
        return list(self._lab2cname.values())

    @property
    def num_classes(self) -> int:
        return max(self._lab2cname) + 1

    def generate_fewshot_dataset(self, *data_sources: Sequence[Datum], num_shots: int = -1) -> Any:
        """`num_shots` items of each class, classes in order of first appearance, drawn with Python's `random`.

        A class that has fewer is taken whole. One list gives one list, several give a list of lists.
        """
        picked = []
        for source in data_sources:
            if num_shots < 1:
                picked.append(list(source))
                continue
            groups: dict[int, list[Datum]] = {}
            for item in source:
                groups.setdefault(item.label, []).append(item)
            picked.append(
                [
                    item
                    for group in groups.values()
                    for item in (random.sample(group, num_shots) if len(group) >= num_shots else group)
                ]
            )
        return picked[0] if len(picked) == 1 else picked


class DatasetWrapper(Dataset):
    """Reads and transforms a list: dicts of img (a list of views if K_TRANSFORMS > 1), label, domain, impath, index."""

    def __init__(self, cfg: Any, data_source: Sequence[Datum], transform: Any = None, is_train: bool = False) -> None:
        self.cfg, self.data_source, self.transform, self.is_train = cfg, data_source, transform, is_train
        self.views = cfg.DATALOADER.K_TRANSFORMS if is_train else 1
        if self.views > 1 and transform is None:
            raise ValueError(f"DATALOADER.K_TRANSFORMS {self.views} wants a transform; INPUT.NO_TRANSFORM is True")
        self.plain = T.Compose(plain_steps(cfg.INPUT)) if cfg.DATALOADER.RETURN_IMG0 else None
        self.features: Any = None  # a feature_cache.Lookup: asked before an image is decoded
        self.image_seed: int | None = None  # of the epoch, where the augmentation of an image depends on nothing else

    def __len__(self) -> int:
        return len(self.data_source)

    def __getitem__(self, index: int) -> dict[str, Any]:
        if self.image_seed is None:
            return self._read(index)
        with seeded(self.image_seed, index):
            return self._read(index)

    def _read(self, index: int) -> dict[str, Any]:
        item = self.data_source[index]
        output = {"label": item.label, "domain": item.domain, "impath": item.impath, "index": index}
        if self.features is not None:
            output["key"], output["feature"] = self.features.find(item.impath)
            if output["feature"] is not None:
                return output
        image = read_image(item.impath)
        transforms = self.transform if isinstance(self.transform, (list, tuple)) else [self.transform]
        for number, transform in enumerate(transforms, 1):
            output["img" if number == 1 else f"img{number}"] = self._view(transform, image)
        if self.plain is not None:
            output["img0"] = self.plain(image)
        return output

    def _view(self, transform: Any, image: Any) -> Any:
        if transform is None:
            return image
        views = [transform(image) for _ in range(self.views)]
        return views[0] if len(views) == 1 else views


def collate(items: list[Any]) -> Any:
    """torch's own, but whole numbers of a dict share one tensor, since a worker sends each storage by itself."""
    first = items[0]
    if isinstance(first, dict) and "feature" in first:
        return _collate_known(items)
    names = [name for name, value in first.items() if type(value) is int] if isinstance(first, dict) else []
    if not names:
        return default_collate(items)
    rest = default_collate([{name: value for name, value in item.items() if name not in names} for item in items])
    numbers = torch.tensor([[item[name] for item in items] for name in names])
    return rest | dict(zip(names, numbers, strict=True))


def _collate_known(items: list[dict[str, Any]]) -> dict[str, Any]:
    """Of a batch that asked the feature cache: `hit` [N], `features` of the hits, `img` of the others, all `keys`."""
    apart = ("img", "feature", "key")
    batch = collate([{name: value for name, value in item.items() if name not in apart} for item in items])
    known = [item["feature"] for item in items if item["feature"] is not None]
    pixels = [item["img"] for item in items if item["feature"] is None]
    return batch | {
        "hit": torch.tensor([item["feature"] is not None for item in items]),
        "features": torch.stack(known) if known else torch.empty(0),
        "img": torch.stack(pixels) if pixels else torch.empty(0),
        "keys": [item["key"] for item in items],
    }


def build_data_loader(
    cfg: Any,
    source: Sequence[Datum],
    loader_cfg: Any,
    *,
    transform: Any,
    is_train: bool,
    wrapper: type[Dataset] | None = None,
) -> DataLoader:
    """A loader by the node TRAIN_X or TEST; an incomplete training batch is dropped unless it is the only one."""
    sampler = build_sampler(
        loader_cfg.SAMPLER,
        source,
        batch_size=loader_cfg.BATCH_SIZE,
        n_domain=getattr(loader_cfg, "N_DOMAIN", 0),
        n_ins=getattr(loader_cfg, "N_INS", 16),
    )
    return DataLoader(
        (wrapper or DatasetWrapper)(cfg, source, transform=transform, is_train=is_train),
        **_batches(sampler, loader_cfg.BATCH_SIZE, drop_last=is_train and len(source) >= loader_cfg.BATCH_SIZE,
                   is_train=is_train, images=len(source)),
        num_workers=cfg.DATALOADER.NUM_WORKERS,
        collate_fn=collate,
        pin_memory=torch.cuda.is_available() and cfg.USE_CUDA,
    )


def _batches(sampler: Sampler[int], size: int, *, drop_last: bool, is_train: bool, images: int) -> dict[str, Any]:
    """What DataLoader is told of the batches: all of them, or this process's part of them."""
    rank, world = distributed.rank(), distributed.world_size()
    if world == 1:
        return {"batch_size": size, "sampler": sampler, "drop_last": drop_last}
    if is_train and min(size, images) < world:
        raise ValueError(f"a batch of {min(size, images)} images cannot be shared by {world} processes: raise "
                         "DATALOADER.TRAIN_X.BATCH_SIZE, which is that of all processes together, or start fewer")
    share = distributed.ShareOfBatches if is_train else distributed.EveryNthBatch
    return {"batch_sampler": share(BatchSampler(sampler, size, drop_last), rank=rank, world=world)}


class DataManager:
    """The data set of a config with its loaders; `val_loader` is None where the data set has no val list."""

    train_loader_u = None

    def __init__(
        self,
        cfg: Any,
        custom_tfm_train: Any = None,
        custom_tfm_test: Any = None,
        dataset_wrapper: type[Dataset] | None = None,
    ) -> None:
        self.dataset = build_dataset(cfg)
        check_images(self.dataset, skip_broken=has_key(cfg, "DATASET.SKIP_BROKEN") and cfg.DATASET.SKIP_BROKEN)
        train = custom_tfm_train if custom_tfm_train is not None else build_transform(cfg, is_train=True)
        test = custom_tfm_test if custom_tfm_test is not None else build_transform(cfg, is_train=False)

        def loader(source: Sequence[Datum], *, is_train: bool) -> DataLoader:
            settings = cfg.DATALOADER.TRAIN_X if is_train else cfg.DATALOADER.TEST
            return build_data_loader(
                cfg, source, settings, transform=train if is_train else test, is_train=is_train, wrapper=dataset_wrapper
            )

        self.train_loader_x = loader(self.dataset.train_x, is_train=True)
        self.val_loader = loader(self.dataset.val, is_train=False) if self.dataset.val else None
        self.test_loader = loader(self.dataset.test, is_train=False)
        self.num_classes, self.lab2cname = self.dataset.num_classes, self.dataset.lab2cname
        self.num_source_domains = len(cfg.DATASET.SOURCE_DOMAINS)
        if cfg.VERBOSE:
            print(self.summary(cfg))

    def summary(self, cfg: Any) -> str:
        """A plain table of two columns between two rules."""
        rows = [("Dataset", cfg.DATASET.NAME)]
        rows += [
            (name, ", ".join(domains))
            for name, domains in (("Source", cfg.DATASET.SOURCE_DOMAINS), ("Target", cfg.DATASET.TARGET_DOMAINS))
            if domains
        ]
        rows.append(("# classes", f"{self.num_classes:,}"))
        rows += [
            (f"# {split}", f"{len(items):,}")
            for split in ("train_x", "train_u", "val", "test")
            if (items := getattr(self.dataset, split))
        ]
        left, right = (max(len(row[column]) for row in rows) for column in (0, 1))
        rule = f"{'-' * left}  {'-' * right}"
        return "\n".join([rule, *(f"{name:<{left}}  {value}" for name, value in rows), rule])
