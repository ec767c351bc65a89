"""Two gloo processes against one with the same global batches, for every trainer; and what several processes refuse."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

sys.path.insert(0, str(Path(__file__).parents[1] / "trainers"))

from tiny_world import METHODS, arguments, build, config, distance, random_openai_state, write_data  # noqa: E402

from dear_plugin.engine.checkpoints import find_checkpoint, load_checkpoint  # noqa: E402
from dear_plugin.engine.distributed import (  # noqa: E402
    EveryNthBatch,
    ShareOfBatches,
    by_classes,
    first_only,
    gather,
    in_turns,
    share,
)
from dear_plugin.engine.system import seeded  # noqa: E402
from scripts.train import main  # noqa: E402

CALLS = Path(__file__).with_name("calls_of_train.py")
NAMES = {"CoOp": "prompt_learner", "CoCoOp": "prompt_learner", "MaPLe": "MultiModalPromptLearner",
         "PromptSRC": "VLPromptLearner", "MMRL": "MultiModalRepresentationLearner", "DeAR": "dear_adapter"}
AUGMENTED = {"INPUT.TRANSFORMS": "['random_resized_crop', 'random_flip', 'normalize']"}
PER_IMAGE = {"DATALOADER.AUGMENT_SEED": "image"}


def torchrun(calls: list[list[str]], folder: Path, count: int = 2) -> tuple[list[list[int]], str]:
    """Exit codes by process, and all that was printed."""
    file = folder / "calls.json"
    file.write_text(json.dumps(calls), encoding="utf-8")
    run = subprocess.run(
        [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(count), CALLS, file],
        capture_output=True, text=True, timeout=120, env={**os.environ, "OMP_NUM_THREADS": "1"})
    codes = [file.with_suffix(f".codes{rank}") for rank in range(count)]
    if not all(path.is_file() for path in codes):
        raise RuntimeError(run.stdout + run.stderr)
    return [json.loads(path.read_text(encoding="utf-8")) for path in codes], run.stdout + run.stderr


@pytest.fixture(scope="module")
def ran(tmp_path_factory):
    """Folder with <trainer>/{one,two,new}: trained by one and by two processes, and evaluated by two on new classes."""
    folder = tmp_path_factory.mktemp("processes")
    torch.save(random_openai_state(), folder / "clip.pt")
    where = {"root": write_data(folder / "data"), "backbone": folder / "clip.pt"}
    calls = []
    for trainer in METHODS:
        workers = {"DATALOADER.NUM_WORKERS": 1 if trainer == "DeAR" else 0}
        call = {"trainer": trainer, **where, **AUGMENTED, **workers}
        if main(arguments(out=folder / trainer / "one", **call, **PER_IMAGE)) != 0:
            raise RuntimeError(trainer)
        calls.append(arguments(out=folder / trainer / "two", **call))
        model = ("--eval-only", "--model-dir", str(folder / trainer / "two"))
        calls.append(arguments(out=folder / trainer / "new", flags=model, classes="new", **call))
    cut = folder / "DeAR" / "cut"
    call = {"trainer": "DeAR", **where, **AUGMENTED, "out": cut}
    trainer = build(config(**call, **PER_IMAGE))
    run_epoch = trainer.run_epoch
    trainer.run_epoch = lambda: run_epoch() if trainer.epoch == 0 else (_ for _ in ()).throw(KeyboardInterrupt)
    with pytest.raises(KeyboardInterrupt):
        trainer.train()
    calls.append(arguments(flags=("--resume", str(cut)), **call))
    codes, shown = torchrun(calls, folder)
    return folder, codes, shown, where


def result(folder: Path) -> dict:
    return json.loads((folder / "result.json").read_text(encoding="utf-8"))


def test_all_calls_end_well(ran) -> None:
    _, codes, shown, _ = ran
    assert codes == [[0] * (2 * len(METHODS) + 1)] * 2, shown


@pytest.mark.parametrize("trainer", sorted(METHODS))
def test_two_processes_train_what_one_trains(ran, trainer: str) -> None:
    folder = ran[0] / trainer
    one, two = (load_checkpoint(find_checkpoint(folder / run, NAMES[trainer])) for run in ("one", "two"))
    assert distance(one["state_dict"], two["state_dict"]) < 2e-5
    records = [result(folder / run) for run in ("one", "two")]
    assert records[0]["config_digest"] == records[1]["config_digest"]
    for key in ("steps", "correct", "total", "accuracy_pct", "classnames", "trainable_parameters", "images"):
        assert records[0][key] == records[1][key], key
    rows = [(folder / run / "predictions.csv").read_text(encoding="utf-8").split("\n") for run in ("one", "two")]
    assert [row.split(",")[0] for row in rows[0]] == [row.split(",")[0] for row in rows[1]]  # order of the images


def test_two_processes_go_on_where_one_stopped(ran) -> None:
    one, cut = (load_checkpoint(find_checkpoint(ran[0] / "DeAR" / run, NAMES["DeAR"])) for run in ("one", "cut"))
    assert distance(one["state_dict"], cut["state_dict"]) < 2e-5
    assert "will resume training after epoch 1" in (ran[0] / "DeAR" / "cut" / "log.txt").read_text(encoding="utf-8")


@pytest.mark.parametrize("trainer", ["CoOp", "DeAR"])
def test_evaluation_by_two_is_that_by_one_to_the_bit(ran, trainer: str) -> None:
    folder, _, _, where = ran
    model = ("--eval-only", "--model-dir", str(folder / trainer / "two"))
    call = {"trainer": trainer, **where, **AUGMENTED, "flags": model, "classes": "new", **PER_IMAGE}
    assert main(arguments(out=folder / trainer / "alone", **call)) == 0
    one, two = ((folder / trainer / run / "predictions.csv").read_bytes() for run in ("alone", "new"))
    assert one == two


def test_the_log_is_written_once(ran) -> None:
    log = (ran[0] / "DeAR" / "two" / "log.txt").read_text(encoding="utf-8")
    assert log.count("Evaluate on the *test* set") == 1
    assert "2 processes share each batch; the first one writes" in log


def test_images_are_augmented_alike_for_any_number_of_workers(ran, tmp_path: Path) -> None:
    """With AUGMENT_SEED image; with the seed in the worker the same runs differ."""
    where = ran[3]

    def trained(name: str, workers: int, seed: str) -> dict:
        call = {"DATALOADER.NUM_WORKERS": workers, "DATALOADER.AUGMENT_SEED": seed, "TEST.NO_TEST": True}
        assert main(arguments("CoOp", out=tmp_path / name, **where, **AUGMENTED, **call)) == 0
        return load_checkpoint(find_checkpoint(tmp_path / name, "prompt_learner"))["state_dict"]["ctx"]

    none, two = (trained(f"image{workers}", workers, "image") for workers in (0, 2))
    assert torch.equal(none, two)
    none, two = (trained(f"worker{workers}", workers, "worker") for workers in (0, 2))
    assert not torch.equal(none, two)


def test_bad_input_is_one_sentence_and_ends_all_processes(ran, tmp_path: Path) -> None:
    where = ran[3]
    too_small = arguments("CoOp", out=tmp_path / "small", **where, **{"DATALOADER.TRAIN_X.BATCH_SIZE": 1})
    unknown = arguments("CoOp", out=tmp_path / "seed", **where, **{"DATALOADER.AUGMENT_SEED": "x"})
    foreign = arguments("CoOp", out=ran[0] / "DeAR" / "one", **where)
    codes, shown = torchrun([too_small, unknown, foreign], tmp_path)
    assert codes == [[2, 0, 2], [2, 0, 2]], shown  # the setting is overruled by torchrun
    assert "a batch of 1 images cannot be shared by 2 processes: raise DATALOADER.TRAIN_X.BATCH_SIZE" in shown
    assert shown.count("belongs to another run") == 1
    assert "Traceback" not in shown


def test_one_process_that_fails_ends_all_with_its_sentence(ran, tmp_path: Path) -> None:
    where = {**ran[3], "root": write_data(tmp_path / "data")}
    (tmp_path / "data" / "dtd" / "images" / "grainy" / "1.png").write_bytes(b"x")  # in the share of the second one
    script = str(Path(__file__).parents[2] / "scripts" / "train.py")
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", script]
    run = subprocess.run([*command, *arguments("CoOp", out=tmp_path / "out", **where)], capture_output=True, text=True,
                         timeout=100, env={**os.environ, "OMP_NUM_THREADS": "1"})  # fmt: skip
    assert run.returncode != 0
    assert run.stderr.count("grainy/1.png cannot be read (not an image)") == 1
    assert "[rank" not in run.stderr  # no traceback of the process that lost its partner
    assert not (tmp_path / "out" / "result.json").exists()


def test_an_unknown_seeding_is_refused(ran, tmp_path: Path, capsys) -> None:
    call = {**ran[3], "DATALOADER.AUGMENT_SEED": "batch"}
    assert main(arguments("CoOp", out=tmp_path / "x", **call)) == 2
    assert "DATALOADER.AUGMENT_SEED is 'batch'; allowed (builtin): worker, image" in capsys.readouterr().err


def test_shares_are_even_and_complete() -> None:
    for count in range(20):
        for world in range(1, 6):
            parts = [list(range(count))[share(count, rank, world)] for rank in range(world)]
            assert sum(parts, []) == list(range(count))
            assert max(map(len, parts)) - min(map(len, parts)) <= 1
    batches = [[0, 1, 2], [3, 4, 5], [6]]
    assert [list(ShareOfBatches(batches, rank=rank, world=2)) for rank in (0, 1)] == [
        [[0], [3], []], [[1, 2], [4, 5], [6]]]
    turns = [EveryNthBatch(batches, rank=rank, world=2) for rank in (0, 1)]
    assert [list(part) for part in turns] == [[[0, 1, 2], [6]], [[3, 4, 5]]]
    assert [len(part) for part in turns] == [2, 1]


def test_one_process_is_left_as_it_is() -> None:
    assert first_only(lambda: 3) == 3
    assert gather("x") == ["x"]
    assert list(in_turns(lambda batch: (batch,), [1, 2], 2)) == [(1,), (2,)]
    rows = torch.randn(5, 2, requires_grad=True)
    assert by_classes(lambda part: rows[part], 5).data_ptr() == rows.data_ptr()


def test_seeded_leaves_the_generators_alone() -> None:
    torch.manual_seed(3)
    expected = torch.rand(2)
    torch.manual_seed(3)
    with seeded(1, 2):
        first = torch.rand(2)
    assert torch.equal(torch.rand(2), expected)
    with seeded(1, 2):
        assert torch.equal(torch.rand(2), first)
    with seeded(1, 3):
        assert not torch.equal(torch.rand(2), first)
