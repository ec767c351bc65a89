"""run_protocol: the job lists, what is skipped, continued, redone, and what happens to killed and failing jobs."""

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT / "scripts"))
import run_protocol  # noqa: E402
from protocols import jobs, launchers, state  # noqa: E402

from datasets.shapes import Scene, render  # noqa: E402


@pytest.fixture(scope="module")
def pictures(tmp_path_factory) -> Path:
    """A folder data set of 4 classes with 6 pictures each, below a path with a space and an umlaut."""
    root = tmp_path_factory.mktemp("data") / "Bilder ä"
    rng = np.random.default_rng(0)
    for color in ("red", "green", "blue", "white"):
        (root / f"{color} cup").mkdir(parents=True)
        for i in range(6):
            picture = render(Scene(color, "cup", "plain", "center", "large"), rng)
            Image.fromarray(picture).save(root / f"{color} cup" / f"{i}.png")
    return root


def call(pictures: Path, out: Path, *flags: str, trainer: tuple[str, ...] = ("ZeroshotCLIP",)) -> list[str]:
    return ["base2new", "--trainer", *trainer, "--dataset", "folder", "--seeds", "1", "--cfg", "tiny", "--shots", "2",
            "--data", str(pictures), "--output", str(out), *flags]


def start(arguments: list[str]) -> subprocess.Popen:
    command = [sys.executable, str(ROOT / "scripts" / "run_protocol.py"), *arguments]
    return subprocess.Popen(command, cwd=ROOT, text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT)


def wait_for(condition, *, seconds: float = 60.0) -> None:
    end = time.time() + seconds
    while not condition():
        assert time.time() < end, "waited in vain"
        time.sleep(0.02)


def results(out: Path) -> dict[str, float]:
    return {str(path.parent.relative_to(out)): json.loads(path.read_text())["accuracy_pct"]
            for path in out.rglob("result.json")}  # fmt: skip


@pytest.mark.parametrize(
    ("protocol", "datasets", "count", "places"),
    [
        ("base2new", ("dtd", "eurosat"), 2 * 2 * 3 * 2, {"base2new/train_base", "base2new/test_new"}),
        ("fewshot", ("dtd",), 2 * 3 * 1, {"fewshot/dtd"}),
        ("xd", ("imagenet",), 2 * 3 * 11, {"source/imagenet", "xd/caltech101"}),
        ("dg", ("imagenet",), 2 * 3 * 5, {"source/imagenet", "dg/imagenet_a"}),
        ("xd", ("shapes",), 2 * 3 * 5, {"source/shapes", "xd/shapes_color"}),
    ],
)
def test_job_lists(protocol, datasets, count, places):
    found = jobs.jobs_of(jobs.Plan(protocol, ("DeAR", "ZeroshotCLIP"), datasets))
    assert len(found) == count == len({job.folder for job in found})
    assert all(any(f"output/{place}" in job.folder for job in found) for place in places)
    assert all(any(job.needs == other.folder for other in found[:i]) for i, job in enumerate(found) if job.needs)
    assert not any(job.trains or job.needs for job in found if "ZeroshotCLIP" in job.folder)


def test_protocols_take_the_config_made_for_them():
    assert jobs.default_cfg("MaPLe", "imagenet", "xd") == "vit_b16_c2_ep5_batch4_2ctx_cross_datasets"
    assert jobs.default_cfg("MaPLe", "dtd", "base2new") == "vit_b16_c2_ep5_batch4_2ctx"
    assert jobs.default_cfg("DeAR", "shapes", "xd") == "tiny" == jobs.default_cfg("DeAR", "shapes_hard", "dg")
    assert jobs.default_cfg("MMRL", "dtd", "fewshot") == "vit_b16_few_shot"
    assert jobs.default_cfg("MMRL", "imagenet", "fewshot") == "vit_b16_imagenet"
    assert jobs.default_cfg("MMRL", "imagenet", "xd") == "vit_b16_cross_datasets"
    assert jobs.default_cfg("PromptSRC", "imagenet", "fewshot") == "vit_b16_c2_ep50_batch4_4+4ctx_few_shot"


def test_every_ablation_changes_a_setting_of_dear():
    found = jobs.jobs_of(jobs.Plan("ablation", ("DeAR",), ("shapes",), seeds=(1,)))
    assert len(found) == 2 * len(jobs.ABLATIONS)
    with pytest.raises(ValueError, match="about DeAR's parts, got --trainer CoOp"):
        jobs.jobs_of(jobs.Plan("ablation", ("CoOp",), ("shapes",)))


def test_unknown_names_are_refused(capsys):
    assert run_protocol.main(["base2new", "--dataset", "imagnet"]) == 2
    assert "'imagnet' has no configs/datasets/imagnet.yaml" in capsys.readouterr().err
    assert run_protocol.main(["xd", "--dataset", "dtd"]) == 2
    assert "xd has the sources imagenet, shapes, got 'dtd'" in capsys.readouterr().err


def test_dry_run_writes_nothing(pictures, tmp_path, capsys):
    assert run_protocol.main(call(pictures, tmp_path / "out", "--dry-run")) == 0
    assert capsys.readouterr().out.count("new ") >= 2 and not (tmp_path / "out").exists()


def test_runs_skips_and_redoes_a_cut_result(pictures, tmp_path, capsys):
    out = tmp_path / "out"
    assert run_protocol.main(call(pictures, out, "--jobs", "2")) == 0
    assert "2 of 2 finished" in capsys.readouterr().out
    before = results(out)
    assert len(before) == 2
    cut = next(out.rglob("result.json"))
    cut.write_bytes(cut.read_bytes()[:100])
    assert run_protocol.main(call(pictures, out)) == 0
    assert "2 jobs, 1 finished before, 1 to do" in capsys.readouterr().out
    assert results(out) == before and cut.with_name("result.json.broken").is_file()
    assert json.loads(cut.read_text())["config"]["PROTOCOL"] == "base2new"
    assert run_protocol.main(call(pictures, out, "--set", "DATASET.TEMPLATE", "a {}")) == 1
    assert "holds a finished run of other settings" in capsys.readouterr().out


def test_failures_are_listed_with_their_sentence_and_run_last(pictures, tmp_path, capsys):
    out = tmp_path / "out"
    wrong = call(pictures, out, "--set", "TRAINER.DEAR.BETA", "1.5", trainer=("DeAR", "ZeroshotCLIP"))
    assert run_protocol.main(wrong) == 1
    said = capsys.readouterr().out
    assert "failed: error: beta must lie in [0, 1], got 1.5" in said and "2 of 4 finished" in said
    assert "not run: the training in base2new/train_base/folder" in said
    failed = [path for path in out.rglob("job.json") if json.loads(path.read_text())["state"] == "failed"]
    assert len(failed) == 1 and state.state_of(failed[0].parent) == "failed"
    plan = run_protocol.plan_of(run_protocol.parse_arguments(wrong))
    for zero_shot in out.rglob("*ZeroshotCLIP"):
        shutil.rmtree(zero_shot)
    runner = run_protocol.Runner(jobs.jobs_of(plan), None, places=1, resume=False, output=str(out))
    assert runner.queue[-1].folder == str(failed[0].parent)


@pytest.mark.slow
def test_kill_9_is_told_from_failed_and_resume_gives_the_same_numbers(pictures, tmp_path, capsys):
    whole, cut = tmp_path / "whole", tmp_path / "cut"
    settings = ("--set", "OPTIM.MAX_EPOCH", "4")
    assert run_protocol.main(call(pictures, whole, *settings, trainer=("DeAR",))) == 0
    arguments = call(pictures, cut, *settings, trainer=("DeAR",))
    process = start(arguments)
    wait_for(lambda: list(cut.rglob("resume_state.pt")))
    folder = next(cut.rglob("resume_state.pt")).parent
    process.kill()
    process.wait()
    assert state.state_of(folder) in ("running", "finished")  # the orphan keeps its folder's lock
    pid = json.loads((folder / "job.json").read_text())["pid"]
    try:
        os.kill(pid, signal.SIGKILL)
    except ProcessLookupError:
        pass
    wait_for(lambda: state.state_of(folder) != "running")
    if state.state_of(folder) == "interrupted":  # else it was faster than the signal
        capsys.readouterr()
        assert run_protocol.main(arguments) == 1
        assert "interrupted before: add --resume to continue it" in capsys.readouterr().out
    assert run_protocol.main([*arguments, "--resume"]) == 0
    assert results(cut) == results(whole)


def test_two_calls_on_one_output_share_the_work(pictures, tmp_path):
    processes = [start(call(pictures, tmp_path, "--jobs", "1")) for _ in range(2)]
    said = [process.communicate(timeout=240)[0] for process in processes]
    assert [process.returncode for process in processes] == [0, 0], said
    assert len(results(tmp_path)) == 2
    logs = [path.read_text().count("Result written to") for path in tmp_path.rglob("console.log")]
    assert logs == [1, 1]  # each job ran once


SUBMITIT = ("--launcher", "slurm", "--cluster", "local", "--slurm", "timeout_min=5")
NOT_THERE = "submitit is not installed (optional, for --launcher slurm)"


def kill_when_training(out: Path) -> Path:
    """kill -9 of the process that has finished an epoch of a training below `out`; its folder."""
    wait_for(lambda: list(out.rglob("resume_state.pt")), seconds=200)
    folder = next(out.rglob("resume_state.pt")).parent
    os.kill(json.loads((folder / "job.json").read_text())["pid"], signal.SIGKILL)
    return folder


@pytest.mark.slow
def test_submitit_tells_finished_failed_and_killed_apart_and_goes_on(pictures, tmp_path, capsys):
    """On submitit's local executor: zero-shot finishes, a training is killed with -9, another has a wrong setting."""
    pytest.importorskip("submitit", reason=NOT_THERE)
    out, epochs = tmp_path / "out", ("--set", "OPTIM.MAX_EPOCH", "60")
    arguments = call(pictures, out, *SUBMITIT, "--jobs", "2", *epochs, trainer=("ZeroshotCLIP", "DeAR"))
    process = start(arguments)
    killed = kill_when_training(out)
    said = process.communicate(timeout=400)[0]
    assert process.returncode == 1 and "2 of 4 finished" in said, said
    assert "killed: its process ended with code 1 before it could say why (see " in said
    assert "not run: the training in base2new/train_base/folder" in said
    states = {path.parent.parent.parent.name: state.state_of(path.parent) for path in out.rglob("job.json")}
    assert state.state_of(killed) == "interrupted" and states == {"ZeroshotCLIP": "finished", "DeAR": "interrupted"}
    wrong = call(pictures, tmp_path / "wrong", *SUBMITIT, "--set", "TRAINER.DEAR.BETA", "1.5", trainer=("DeAR",))
    assert run_protocol.main(wrong) == 1
    assert "failed: error: beta must lie in [0, 1], got 1.5" in capsys.readouterr().out
    assert [state.state_of(path.parent) for path in (tmp_path / "wrong").rglob("job.json")] == ["failed"]
    assert run_protocol.main([*arguments, "--resume"]) == 0
    assert "4 jobs, 2 finished before, 2 to do" in capsys.readouterr().out and len(results(out)) == 4


@pytest.mark.slow
def test_a_run_outlives_submitits_own_process(pictures, tmp_path):
    """kill -9 of submitit's process leaves the run as an orphan: it is waited for, and counts as finished."""
    pytest.importorskip("submitit", reason=NOT_THERE)
    process = start(call(pictures, tmp_path, *SUBMITIT, "--set", "OPTIM.MAX_EPOCH", "20", trainer=("DeAR",)))
    wait_for(lambda: list(tmp_path.rglob("resume_state.pt")), seconds=200)
    pid = json.loads(next(tmp_path.rglob("job.json")).read_text())["pid"]
    os.kill(int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1]), signal.SIGKILL)
    said = process.communicate(timeout=400)[0]
    assert process.returncode == 0 and "2 of 2 finished" in said, said


@pytest.mark.parametrize(
    ("flags", "sentence"),
    [
        (("--slurm", "slurm_partion=gpu", "--cluster", "local"), "--slurm: Unknown argument 'partion' for executor"),
        (("--slurm", "timeout_min=long", "--cluster", "local"), '--slurm: Parameter "timeout_min" expected type'),
        (("--cluster", "lokal"), "doesn't know any executor named lokal Without a cluster take --launcher local"),
    ],
)
def test_what_submitit_refuses_is_one_sentence(flags, sentence, pictures, tmp_path, capsys):
    pytest.importorskip("submitit", reason=NOT_THERE)
    assert run_protocol.main(call(pictures, tmp_path, "--launcher", "slurm", *flags)) == 2
    assert sentence in capsys.readouterr().err


def test_slurm_without_submitit_is_one_sentence(monkeypatch, tmp_path):
    monkeypatch.setattr(launchers.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ValueError, match="needs the package submitit: pip install submitit"):
        launchers.SubmititLauncher(tmp_path)


@pytest.mark.parametrize("script", ["xd_train", "xd_test", "dg_test", "fewshot", "ablation", "protocol"])
def test_shell_scripts_say_how_they_are_called(script, tmp_path):
    run = subprocess.run(["bash", str(ROOT / "scripts" / "dear" / f"{script}.sh")], capture_output=True, text=True,
                         cwd=tmp_path)  # fmt: skip
    assert run.returncode == 2 and "DATASET SEED" in run.stderr


@pytest.mark.slow
def test_the_one_command_for_shapes_writes_its_tables(tmp_path):
    environment = os.environ | {"PYTHON": sys.executable, "TRAINERS": "ZeroshotCLIP", "SEEDS": "1", "PROTOCOLS": "xd",
                                "DATA": str(tmp_path / "d"), "OUTPUT": str(tmp_path / "o"), "RESULTS": str(tmp_path)}
    (tmp_path / "d").mkdir()
    run = subprocess.run(["bash", str(ROOT / "scripts" / "shapes_results.sh")], cwd=tmp_path, env=environment,
                         capture_output=True, text=True)  # fmt: skip
    assert run.returncode == 0, run.stderr
    table = (tmp_path / "shapes_xd.md").read_text()
    assert "# shapes, xd" in table and "seeds 1." in table and "commit " in table and "missing" not in table
    assert "average of 4 targets" in table and table.count("| ZeroshotCLIP") == 1
