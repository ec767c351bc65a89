"""In which order a loader visits a list."""

from __future__ import annotations

import random
from collections import defaultdict
from collections.abc import Hashable, Iterator, Sequence
from typing import Any

from torch.utils.data import RandomSampler, Sampler, SequentialSampler

from dear_plugin.engine.registry import check_name


class GroupSampler(Sampler[int]):
    """Batches of the same number of images from several groups (classes or domains), until too few groups are left.

    Each batch takes the groups with most images left, so an epoch's length is known beforehand (a trainer steps its
    learning rate on the last batch); the images and the order of the batches are drawn with Python's `random`.
    """

    def __init__(self, groups: Sequence[Hashable], *, groups_per_batch: int, images_per_group: int) -> None:
        self.members: dict[Hashable, list[int]] = defaultdict(list)
        for index, group in enumerate(groups):
            self.members[group].append(index)
        if not 0 < groups_per_batch <= len(self.members):
            raise ValueError(
                f"a batch wants images of {groups_per_batch} groups, the data has {len(self.members)}: "
                "change DATALOADER.TRAIN_X.BATCH_SIZE, N_INS or N_DOMAIN"
            )
        self.groups_per_batch, self.images_per_group = groups_per_batch, images_per_group
        self.batches = sum(1 for _ in self._rounds())

    def _rounds(self) -> Iterator[list[Hashable]]:
        left = {group: len(members) for group, members in self.members.items()}
        while True:
            chosen = sorted(left, key=left.__getitem__, reverse=True)[: self.groups_per_batch]
            if left[chosen[-1]] < self.images_per_group:
                return
            for group in chosen:
                left[group] -= self.images_per_group
            yield chosen

    def __iter__(self) -> Iterator[int]:
        images = {group: random.sample(members, len(members)) for group, members in self.members.items()}
        rounds = list(self._rounds())
        random.shuffle(rounds)
        for chosen in rounds:
            for group in chosen:
                for _ in range(self.images_per_group):
                    yield images[group].pop()

    def __len__(self) -> int:
        return self.batches * self.groups_per_batch * self.images_per_group


SAMPLERS = ("RandomSampler", "SequentialSampler", "RandomDomainSampler", "SeqDomainSampler", "RandomClassSampler")


def build_sampler(name: str, source: Sequence[Any], *, batch_size: int, n_domain: int, n_ins: int) -> Sampler[int]:
    """A sampler over a list of Datum by the contract's name."""
    check_name(name, SAMPLERS, what="sampler", key="DATALOADER.TRAIN_X.SAMPLER or DATALOADER.TEST.SAMPLER")
    if name == "RandomSampler":
        return RandomSampler(source)
    if name == "SequentialSampler":
        return SequentialSampler(source)
    if name == "RandomClassSampler":
        return GroupSampler(
            [item.label for item in source], groups_per_batch=batch_size // n_ins, images_per_group=n_ins
        )
    domains = [item.domain for item in source]
    per_batch = len(set(domains)) if name == "SeqDomainSampler" or n_domain <= 0 else n_domain
    if batch_size % per_batch:
        raise ValueError(
            f"DATALOADER.TRAIN_X.BATCH_SIZE {batch_size} is not a multiple of the {per_batch} domains of a batch"
        )
    return GroupSampler(domains, groups_per_batch=per_batch, images_per_group=batch_size // per_batch)
