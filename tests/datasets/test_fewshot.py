"""Few-shot picks: CoOp's draws, kept as JSON, replayed, and refused where they do not belong."""

from __future__ import annotations

import json
import random
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from datasets.fewshot import PICKS_FILE, apply_picks, draw, draw_picks
from datasets.splits import Item, Split, lines_hash, read_split

# Positions drawn by CPython 3.11's random for groups of 20, 3 and 100 items, seed 1.
KNOWN = {
    4: [[4, 18, 2, 8], [0, 1, 2], [15, 63, 97, 57]],
    16: [
        [4, 18, 2, 8, 3, 7, 12, 14, 13, 10, 6, 15, 1, 16, 0, 9],
        [0, 1, 2],
        [55, 77, 97, 98, 0, 89, 57, 34, 92, 29, 75, 13, 40, 3, 2, 83],
    ],
}


def positions(paths: list[str]) -> list[list[int]]:
    groups: dict[str, list[int]] = {}
    for path in paths:
        _, label, position = path.split("/")
        groups.setdefault(label, []).append(int(position))
    return list(groups.values())


@pytest.mark.parametrize("shots", KNOWN)
def test_known_answers_of_the_train_draw(split_of, shots):
    picks = draw_picks(split_of([20, 3, 100]), dataset="X", shots=shots, seed=1)
    assert positions(picks.train) == KNOWN[shots]


def test_val_goes_on_in_the_same_stream(split_of):
    picks = draw_picks(split_of([10, 10], [6, 6]), dataset="X", shots=2, seed=1)
    assert positions(picks.train) == [[2, 1], [4, 1]] and positions(picks.val) == [[3, 5], [3, 5]]


def test_val_takes_at_most_four_and_test_stays_whole(split_of):
    split = split_of([40, 40], [9, 9], test=7)
    cut = apply_picks(split, draw_picks(split, dataset="X", shots=16, seed=3))
    assert (len(cut.train), len(cut.val), len(cut.test)) == (32, 8, 14)


def test_val_that_is_the_test_list_is_not_drawn_from():
    items = [Item(f"a/{i}", 0, "a") for i in range(9)]
    split = Split(items, items, items, folder=Path("."))
    cut = apply_picks(split, draw_picks(split, dataset="ImageNet", shots=2, seed=1))
    assert len(cut.train) == 2 and cut.val is cut.test is items


def test_groups_come_in_order_of_first_appearance():
    items = [Item("b0", 1, "b"), Item("a0", 0, "a"), Item("b1", 1, "b"), Item("a1", 0, "a")]
    assert [item.label for item in draw(items, 2, random.Random(1))] == [1, 1, 0, 0]


def test_the_global_random_state_is_neither_read_nor_moved(split_of):
    split = split_of([20, 30])
    random.seed(5)
    before = random.getstate()
    first = draw_picks(split, dataset="X", shots=4, seed=2)
    assert random.getstate() == before
    random.random()
    assert draw_picks(split, dataset="X", shots=4, seed=2) == first


def test_no_seed_means_picks_that_differ(split_of):
    split = split_of([500])
    drawn = {tuple(draw_picks(split, dataset="X", shots=16, seed=-1).train) for _ in range(3)}
    assert len(drawn) == 3


@settings(max_examples=40, deadline=None)
@given(sizes=st.lists(st.integers(1, 12), min_size=1, max_size=6), shots=st.integers(1, 9), seed=st.integers(0, 99))
def test_every_class_gives_its_shots_or_all_it_has_once(sizes, shots, seed):
    items = [Item(f"{label}/{i}", label, str(label)) for label, size in enumerate(sizes) for i in range(size)]
    drawn = draw(items, shots, random.Random(seed))
    assert len(set(drawn)) == len(drawn) and set(drawn) <= set(items)
    assert [sum(item.label == label for item in drawn) for label in range(len(sizes))] == [
        min(size, shots) for size in sizes
    ]


def test_picks_are_json_of_relative_paths_and_outlive_a_move_of_the_data(eurosat, load, tmp_path):
    root, _ = eurosat({"Forest": 6, "River": 6})
    first = load("EuroSAT", root, shots=2)
    stored = json.loads((tmp_path / "out" / PICKS_FILE).read_text())
    assert stored["train"] == [
        Path(d.impath).relative_to(root / "eurosat" / "2750").as_posix() for d in first.train_x
    ]
    assert (stored["dataset"], stored["shots"], stored["seed"]) == ("EuroSAT", 2, 1)
    moved = root.rename(tmp_path / "moved data")
    again = load("EuroSAT", moved, shots=2)
    assert again.facts["picks_sha256"] == first.facts["picks_sha256"] == stored["sha256"]
    assert all(Path(d.impath).is_file() and Path(d.impath).is_relative_to(moved) for d in again.train_x)


def test_nothing_is_written_beside_the_data(eurosat, load):
    root, _ = eurosat({"Forest": 6, "River": 6})
    before = sorted(root.rglob("*"))
    load("EuroSAT", root, shots=2)
    assert sorted(root.rglob("*")) == before


def test_no_output_folder_no_file(eurosat, load, tmp_path):
    root, _ = eurosat({"Forest": 6, "River": 6})
    assert len(load("EuroSAT", root, shots=2, output="").train_x) == 4
    assert not (tmp_path / "out").exists()


def test_changed_split_is_refused(eurosat, load):
    root, split = eurosat({"Forest": 6, "River": 6})
    load("EuroSAT", root, shots=2)
    split["train"].reverse()
    (root / "eurosat" / "split_zhou_EuroSAT.json").write_text(json.dumps(split))
    with pytest.raises(
        ValueError,
        match=r"picks\.json holds picks of another split of EuroSAT .*choose another OUTPUT_DIR, or delete",
    ):
        load("EuroSAT", root, shots=2)


def test_folder_of_another_run_is_refused(eurosat, load):
    root, _ = eurosat({"Forest": 6, "River": 6})
    load("EuroSAT", root, shots=2)
    with pytest.raises(
        ValueError, match=r"belongs to another run \(EuroSAT, 2 shots, seed 1; this one is EuroSAT, 2 shots, seed 2\)"
    ):
        load("EuroSAT", root, shots=2, seed=2)


def test_edited_picks_are_refused(eurosat, load, tmp_path):
    root, _ = eurosat({"Forest": 6, "River": 6})
    load("EuroSAT", root, shots=2)
    file = tmp_path / "out" / PICKS_FILE
    content = json.loads(file.read_text())
    file.write_text(json.dumps(content | {"train": content["train"][::-1]}))
    with pytest.raises(ValueError, match="was edited"):
        load("EuroSAT", root, shots=2)
    file.write_text("{")
    with pytest.raises(ValueError, match=r"picks\.json is no JSON file .*fetch or make it again"):
        load("EuroSAT", root, shots=2)
    file.write_text("{}")
    with pytest.raises(ValueError, match="is no picks file of schema 1: it needs the fields dataset, "):
        load("EuroSAT", root, shots=2)


def test_replay_takes_the_picks_of_another_run_and_keeps_a_copy(eurosat, load, tmp_path):
    root, _ = eurosat({"Forest": 9, "River": 9})
    first = load("EuroSAT", root, shots=3, seed=1)
    file = str(tmp_path / "out" / PICKS_FILE)
    again = load("EuroSAT", root, shots=3, seed=7, PICKS=file, output=tmp_path / "second")
    assert [d.impath for d in again.train_x] == [d.impath for d in first.train_x]
    assert again.facts["picks_seed"] == 1
    assert json.loads((tmp_path / "second" / PICKS_FILE).read_text()) == json.loads(Path(file).read_text())


def test_a_replay_can_be_repeated_in_its_folder(eurosat, load, tmp_path):
    root, _ = eurosat({"Forest": 9, "River": 9})
    load("EuroSAT", root, shots=3, seed=1)
    for _ in range(2):
        load("EuroSAT", root, shots=3, seed=7, PICKS=str(tmp_path / "out" / PICKS_FILE), output=tmp_path / "second")


def test_replay_refusals(eurosat, load, tmp_path):
    root, _ = eurosat({"Forest": 9, "River": 9})
    load("EuroSAT", root, shots=3)
    file = str(tmp_path / "out" / PICKS_FILE)
    with pytest.raises(ValueError, match="holds 3 shots, but DATASET.NUM_SHOTS is 4: set DATASET.NUM_SHOTS 3"):
        load("EuroSAT", root, shots=4, PICKS=file, output="")
    with pytest.raises(ValueError, match="DATASET.NUM_SHOTS -1 asks for all images"):
        load("EuroSAT", root, PICKS=file, output="")
    with pytest.raises(
        FileNotFoundError, match=r"few-shot picks no\.json not found: DATASET.PICKS takes the picks.json of a run"
    ):
        load("EuroSAT", root, shots=3, PICKS="no.json", output="")
    load("EuroSAT", root, shots=3, seed=2, output=tmp_path / "other")
    with pytest.raises(ValueError, match=r"other/picks\.json holds other picks than .*: choose another OUTPUT_DIR"):
        load("EuroSAT", root, shots=3, PICKS=file, output=tmp_path / "other")
    content = json.loads(Path(file).read_text())
    Path(file).write_text(json.dumps(content | {"dataset": "Food101"}))
    with pytest.raises(
        ValueError, match="holds picks of Food101, but DATASET.NAME is EuroSAT: take the picks of a run on this split"
    ):
        load("EuroSAT", root, shots=3, PICKS=file, output="")


def test_picks_that_the_split_has_not_are_named(split_of):
    picks = draw_picks(split_of([5]), dataset="X", shots=2, seed=1)
    with pytest.raises(ValueError, match="the few-shot picks name 2 train images that the split has not: train/0/"):
        apply_picks(Split([Item("x", 0, "a")], [], [], folder=Path(".")), picks)


def test_class_with_fewer_images_than_shots_is_taken_whole_and_said(eurosat, load, capsys):
    root, _ = eurosat({"Forest": 5, "River": 40})
    data = load("EuroSAT", root, shots=16)
    assert [sum(d.label == label for d in data.train_x) for label in (0, 1)] == [5, 16]
    assert data.facts["short_classes"] == {"Forest": 5}
    assert (
        "EuroSAT: 1 classes have fewer train images than 16 shots and are taken whole: Forest (5)"
        in capsys.readouterr().out
    )


@pytest.mark.parametrize("shots", [0, -1])
def test_zero_and_negative_shots_take_everything(eurosat, load, shots):
    root, _ = eurosat({"Forest": 5, "River": 8})
    data = load("EuroSAT", root, shots=shots)
    assert len(data.train_x) == 13 and data.facts["picks_sha256"] is None and data.facts["shots"] is None


def test_the_105_published_selections(shared_data):
    reference = json.loads((shared_data / "splits" / "fewshot_reference.json").read_text())
    splits: dict[str, Split] = {}
    for key, wanted in reference.items():
        name, _, rest = key.partition("/shot_")
        shots, _, seed = rest.partition("-seed_")
        if name not in splits:
            splits[name] = read_split(shared_data / "splits" / f"split_zhou_{name}.json", Path("."))
        picks = draw_picks(splits[name], dataset=name, shots=int(shots), seed=int(seed))
        assert (len(picks.train), len(picks.val)) == (wanted["train"], wanted["val"]), key
        assert (lines_hash(picks.train), lines_hash(picks.val)) == (wanted["train_sha256"], wanted["val_sha256"]), key
    assert len(reference) == 105 and len(splits) == 7
