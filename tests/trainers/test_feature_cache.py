"""The feature cache: exact, never stale, bounded, shared, and without effect on anything but time."""

from __future__ import annotations

import json
import multiprocessing
import os
import sqlite3
from pathlib import Path

import pytest
import torch
from tiny_world import arguments, build, distance, random_openai_state

from dear_plugin.engine import data
from dear_plugin.engine.feature_cache import FILE, FeatureCache, Lookup, tower_digest
from scripts.train import main

FIXED = {"INPUT.TRANSFORMS": "['normalize']"}
CACHED = ["CoCoOp", "CoOp", "DeAR", "MMRL", "ZeroshotCLIP"]


def keys(count: int, start: int = 0) -> list[bytes]:
    return [bytes([start + number]) * 16 for number in range(count)]


def cache_in(folder: Path, gib: float = 1.0) -> FeatureCache:
    return FeatureCache(folder, limit_gib=gib, made_by=("weights", 3))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_what_comes_out_is_what_went_in(tmp_path: Path, dtype: torch.dtype) -> None:
    features = torch.randn(3, 5, 4).to(dtype)
    cache_in(tmp_path).put(keys(3), features)
    again = cache_in(tmp_path)
    for key, row in zip(keys(3), features, strict=True):
        found = again.get(key)
        assert found.dtype == dtype
        assert torch.equal(found, row)
    assert again.get(b"other") is None
    assert again.size() == features.numel() * features.element_size()


def test_what_was_not_used_for_longest_leaves(tmp_path: Path) -> None:
    row = 256 * 4
    cache = cache_in(tmp_path, gib=4.5 * row / 2**30)
    for key in keys(4):
        cache.put([key], torch.randn(1, 256))
    cache.touch(keys(1))
    cache.put(keys(2, start=10), torch.randn(2, 256))
    there = [cache.get(key) is not None for key in keys(4) + keys(2, start=10)]
    assert there == [True, False, False, True, True, True]
    assert cache.size() == 4 * row
    cache.put(keys(9, start=20), torch.randn(9, 256))  # more than fit at once
    assert cache.size() == 4 * row
    cache.put([b"huge" * 4], torch.randn(1, 4096))
    assert cache.get(b"huge" * 4) is None


def test_an_entry_is_replaced_and_counted_once(tmp_path: Path) -> None:
    cache = cache_in(tmp_path)
    for _ in range(3):
        features = torch.randn(2, 8)
        cache.put(keys(2), features)
    assert torch.equal(cache.get(keys(2)[1]), features[1])
    assert cache.size() == 2 * 8 * 4


def test_a_damaged_entry_is_computed_again(tmp_path: Path) -> None:
    cache = cache_in(tmp_path)
    cache.put(keys(2), torch.randn(2, 8))
    with sqlite3.connect(tmp_path / FILE) as connection:
        connection.execute("UPDATE contents SET data = ? WHERE key = ?", (b"\0" * 32, keys(1)[0]))
    assert cache.get(keys(1)[0]) is None
    assert cache.get(keys(2)[1]) is not None
    cache.put(keys(1), torch.ones(1, 8))
    assert torch.equal(cache.get(keys(1)[0]), torch.ones(8))


def test_a_damaged_file_is_started_anew(tmp_path: Path, capsys) -> None:
    (tmp_path / FILE).write_bytes(b"this is no database " * 500)
    cache = cache_in(tmp_path)
    assert "is damaged" in capsys.readouterr().out
    cache.put(keys(1), torch.ones(1, 8))
    assert torch.equal(cache.get(keys(1)[0]), torch.ones(8))
    assert len(list(tmp_path.iterdir())) <= 3


def test_a_place_that_cannot_be_written_is_one_sentence(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("x")
    with pytest.raises(ValueError, match=r"DATALOADER.FEATURE_CACHE: .* cannot be written .* give another folder"):
        cache_in(tmp_path / "file")
    with pytest.raises(ValueError, match="FEATURE_CACHE_GIB is 0; wanted more than 0"):
        cache_in(tmp_path, gib=0)


def test_a_key_changes_with_all_that_the_features_depend_on(tmp_path: Path) -> None:
    image = tmp_path / "a.png"
    image.write_bytes(b"12345")
    os.utime(image, ns=(10, 10))
    cache = cache_in(tmp_path / "cache")
    other = FeatureCache(tmp_path / "cache", limit_gib=1, made_by=("weights", 4))
    found = {cache.key(str(image), "resize"), cache.key(str(image), "crop"), other.key(str(image), "resize")}
    os.utime(image, ns=(11, 11))
    found.add(cache.key(str(image), "resize"))
    image.write_bytes(b"123456")
    os.utime(image, ns=(11, 11))
    found.add(cache.key(str(image), "resize"))
    (tmp_path / "b.png").write_bytes(b"123456")
    os.utime(tmp_path / "b.png", ns=(11, 11))
    found.add(cache.key(str(tmp_path / "b.png"), "resize"))
    assert len(found) == 6
    assert Lookup(cache, "crop").find(str(image)) == (cache.key(str(image), repr("crop")), None)


def test_the_digest_sees_one_changed_bit() -> None:
    tower = torch.nn.Linear(3, 3)
    before = tower_digest(tower)
    with torch.no_grad():
        tower.bias[0] = torch.nextafter(tower.bias[0], torch.tensor(9.0))
    assert tower_digest(tower) != before
    assert tower_digest(torch.nn.Linear(3, 3).half()) != before
    attention = torch.nn.MultiheadAttention(4, 2)
    before = tower_digest(attention)
    attention.num_heads = 4
    assert tower_digest(attention) != before
    assert tower_digest(torch.nn.GELU()) != tower_digest(torch.nn.ReLU())


def _write(folder: Path, start: int) -> None:
    cache = cache_in(folder, gib=40 * 64 * 4 / 2**30)
    for number in range(40):
        key = bytes([start, number]) * 8
        cache.put([key], torch.full((1, 64), float(start + number)))


def test_processes_may_share_it(tmp_path: Path) -> None:
    context = multiprocessing.get_context("spawn")
    workers = [context.Process(target=_write, args=(tmp_path, start)) for start in (1, 100)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join(60)
        assert worker.exitcode == 0
    cache, found = cache_in(tmp_path), 0
    for start in (1, 100):
        for number in range(40):
            row = cache.get(bytes([start, number]) * 8)
            if row is not None:
                found += 1
                assert torch.equal(row, torch.full((64,), float(start + number)))
    assert found == 40
    assert cache.size() == 40 * 64 * 4


def run(world, trainer: str, out: Path, cache: Path | None = None, **options) -> dict:
    setting = {"DATALOADER.FEATURE_CACHE": str(cache)} if cache else {}
    flags = ("--eval-only",) if trainer == "ZeroshotCLIP" else ()
    call = arguments(trainer, root=world.root, backbone=world.backbone, out=out, flags=flags,
                     **{**FIXED, **setting, **options})
    assert main(call) == 0
    return json.loads((out / "result.json").read_text(encoding="utf-8"))


@pytest.mark.parametrize("trainer", CACHED)
def test_runs_with_and_without_the_cache_agree(world, tmp_path: Path, trainer: str, monkeypatch, capsys) -> None:
    """Empty at first, then full: a second run decodes only the sample that is looked at before and after training."""
    plain = run(world, trainer, tmp_path / "plain")
    filling = run(world, trainer, tmp_path / "filling", tmp_path / "cache")
    reads: list[str] = []
    read_image = data.read_image
    monkeypatch.setattr(data, "read_image", lambda path: reads.append(str(path)) or read_image(path))
    full = run(world, trainer, tmp_path / "full", tmp_path / "cache")
    shown = capsys.readouterr().out
    assert "9 images from" in shown.split("Feature cache:")[-1] or trainer != "ZeroshotCLIP"
    assert ", 0 computed" in shown.split("Feature cache:")[-1]
    samples = 0 if trainer == "ZeroshotCLIP" else 2 * full["zero_shot_sample"]["images"]
    assert len(reads) == samples
    for result in (filling, full):
        for key in ("accuracy_pct", "correct", "config_digest", "per_class", "zero_shot_sample"):
            assert result[key] == plain[key], key
    if trainer == "ZeroshotCLIP":
        return
    states = [torch.load(next((tmp_path / name).glob("*/model.pth.tar-2")), weights_only=True)["state_dict"]
              for name in ("plain", "filling", "full")]
    assert max(distance(states[0], state) for state in states[1:]) < 2e-5


def test_other_weights_find_nothing(world, tmp_path: Path, capsys) -> None:
    run(world, "ZeroshotCLIP", tmp_path / "one", tmp_path / "cache")
    torch.save(random_openai_state(seed=1), tmp_path / "other.pt")
    world = type(world)(root=world.root, backbone=tmp_path / "other.pt")
    run(world, "ZeroshotCLIP", tmp_path / "two", tmp_path / "cache")
    assert ", 9 computed" in capsys.readouterr().out.split("Feature cache:")[-1]


def test_a_small_cache_still_gives_the_right_answer(world, tmp_path: Path) -> None:
    plain = run(world, "DeAR", tmp_path / "plain")
    row = 5 * 128 * 4
    small = run(world, "DeAR", tmp_path / "small", tmp_path / "cache",
                **{"DATALOADER.FEATURE_CACHE_GIB": 4.5 * row / 2**30, "DATALOADER.NUM_WORKERS": 2})
    assert small["correct"] == plain["correct"]
    assert cache_in(tmp_path / "cache").size() <= 4 * row


def test_augmented_images_and_methods_without_a_frozen_part_are_left_out(world, tmp_path: Path, capsys) -> None:
    transforms = {"INPUT.TRANSFORMS": "['random_flip', 'normalize']"}
    run(world, "CoOp", tmp_path / "flip", tmp_path / "cache", **transforms)
    shown = capsys.readouterr().out
    assert "The feature cache leaves the training images out: random_flip" in shown
    assert "0 images from" in shown
    assert ", 9 computed" in shown
    run(world, "MaPLe", tmp_path / "maple", tmp_path / "unused")
    assert "DATALOADER.FEATURE_CACHE has no effect: MaPLe has no frozen first layers" in capsys.readouterr().out
    assert not (tmp_path / "unused").exists()


def test_a_trainer_reads_features_in_the_order_of_its_batch(world, tmp_path: Path) -> None:
    cfg = world.cfg("DeAR", tmp_path / "out", **{**FIXED, "DATALOADER.FEATURE_CACHE": str(tmp_path / "cache")})
    trainer = build(cfg)
    plain = build(world.cfg("DeAR", tmp_path / "plain", **FIXED))
    batches = list(trainer.test_loader)
    trainer.parse_batch_test(batches[1])  # the second batch is known now, and half of a mixed one
    mixed = data.collate([trainer.test_loader.dataset[index] for index in (0, 5, 1, 4)])
    assert mixed["hit"].tolist() == [False, True, False, True]
    features, labels = trainer.parse_batch_test(mixed)
    images = torch.stack([plain.test_loader.dataset[index]["img"] for index in (0, 5, 1, 4)])
    torch.testing.assert_close(features, plain.role_clip.trunk(images), rtol=1e-5, atol=1e-5)
    assert labels.tolist() == [plain.test_loader.dataset[index]["label"] for index in (0, 5, 1, 4)]
