"""scripts/train.py: precedence, seeds, --resume, folders, and one sentence with exit code 2 for bad input."""

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest
from engine_toys import Killed, ToyMethod, read_result

from dear_plugin.engine import ENGINE

SCRIPT = Path(__file__).resolve().parents[2] / "scripts" / "train.py"


@pytest.fixture
def out(tmp_path):
    return tmp_path / "out"


def test_help_is_light_and_works_from_anywhere(tmp_path):
    code = (
        "import runpy, sys\n"
        f"sys.argv = ['train.py', '--help']\n"
        f"try:\n    runpy.run_path({str(SCRIPT)!r}, run_name='__main__')\n"
        "except SystemExit as end:\n"
        "    print('heavy:', [m for m in ('torch', 'yacs', 'open_clip') if m in sys.modules], end.code)"
    )
    run = subprocess.run([sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True, timeout=60)
    assert "heavy: [] 0" in run.stdout and "--eval-only" in run.stdout and "0 is a seed" in run.stdout


def test_training_then_evaluation(call_train, out, tmp_path, capsys):
    assert call_train("--seed", "1") == 0
    shown = capsys.readouterr().out
    assert "Setting fixed seed: 1" in shown and "** Config **" in shown and "torch: " in shown
    log = (out / "log.txt").read_text()
    assert "Setting fixed seed" not in log  # as in the contract: the log opens after it
    after_end = log.split("Finish training\n")[1]
    matches = re.findall(r"\* accuracy: ([\d.]+)%", after_end)
    result = read_result(out)
    assert matches == [f"{result['accuracy_pct']:.1f}"]
    assert call_train("--seed", "1") == 0
    assert "is finished: accuracy" in capsys.readouterr().out and (out / "log.txt").read_text() == log
    assert call_train("--seed", "1", "--eval-only", "--model-dir", str(out), out="eval") == 0
    assert read_result(tmp_path / "eval")["accuracy_pct"] == result["accuracy_pct"]
    capsys.readouterr()
    assert call_train("--seed", "1", "--eval-only", "--model-dir", str(out), out="eval") == 0
    assert "is finished" in capsys.readouterr().out


def test_evaluation_is_repeated_when_the_weights_changed(call_train, tmp_path, capsys):
    for seed in ("1", "2"):
        assert call_train("--seed", seed, out=f"train{seed}") == 0
    flags = ("--seed", "1", "--eval-only", "--model-dir")
    assert call_train(*flags, str(tmp_path / "train1"), out="eval") == 0
    capsys.readouterr()
    assert call_train(*flags, str(tmp_path / "train2"), out="eval") == 0
    assert "holds other weights than those evaluated" in capsys.readouterr().out
    assert "train2" in read_result(tmp_path / "eval")["loaded"]["toy_head"]["file"]
    assert len(list((tmp_path / "eval").glob("log.txt-*"))) == 1


@pytest.mark.parametrize(
    ("yaml_seed", "flags", "wanted"),
    [
        (None, (), -1),
        (5, (), 5),
        (5, ("--seed", "0"), 0),
        (5, ("--seed", "3"), 3),
        (5, ("--seed", "3", "SEED", "4"), 4),
        (5, ("--seed", "-1"), -1),
    ],
)
def test_precedence(train_script, tmp_path, yaml_seed, flags, wanted):
    data, method = tmp_path / "d.yaml", tmp_path / "m.yaml"
    data.write_text("DATASET:\n  NAME: FromData\nOPTIM:\n  LR: 0.5\n  MAX_EPOCH: 7\n")
    method.write_text(
        "OPTIM:\n  LR: 0.25\nMODEL:\n  BACKBONE:\n    NAME: file\n" + (f"SEED: {yaml_seed}\n" if yaml_seed else "")
    )
    files = ["--dataset-config-file", str(data), "--config-file", str(method), "--backbone", "flag"]
    cfg = train_script.build_config(train_script.parse_arguments([*files, *flags]))
    assert cfg.SEED == wanted and cfg.is_frozen()
    assert (cfg.OPTIM.LR, cfg.OPTIM.MAX_EPOCH, cfg.DATASET.NAME, cfg.MODEL.BACKBONE.NAME) == (
        0.25,
        7,
        "FromData",
        "flag",
    )


def test_flags_keep_text_and_types(train_script):
    args = ["--root", "2024", "--transforms", "random_flip", "normalize", "--source-domains", "a"]
    cfg = train_script.build_config(train_script.parse_arguments(args))
    assert cfg.DATASET.ROOT == "2024" and cfg.INPUT.TRANSFORMS == ("random_flip", "normalize")
    assert cfg.DATASET.SOURCE_DOMAINS == ("a",)


@pytest.mark.parametrize(
    ("flags", "resume", "lr"),
    [
        (["--resume"], "OUT", 0.0003),
        (["--resume", "OPTIM.LR", "1"], "OUT", 1.0),
        (["--resume", "some/where", "OPTIM.LR", "1"], "some/where", 1.0),
        (["OPTIM.LR", "1"], "", 1.0),
    ],
)
def test_resume_flag(train_script, flags, resume, lr):
    cfg = train_script.build_config(train_script.parse_arguments(["--output-dir", "OUT", *flags]))
    assert (cfg.RESUME, cfg.OPTIM.LR) == (resume, lr)


def test_interrupted_run(call_train, out, tmp_path, capsys, monkeypatch):
    assert call_train("--seed", "1", out="whole") == 0
    monkeypatch.setattr(ToyMethod, "kill_at", 4)
    with pytest.raises(Killed):
        call_train("--seed", "1")
    monkeypatch.setattr(ToyMethod, "kill_at", -1)
    capsys.readouterr()
    assert call_train("--seed", "1") == 2
    assert capsys.readouterr().err.startswith(
        f"error: {out} holds an interrupted run of the same settings: add --resume"
    )
    assert call_train("--seed", "1", "--resume") == 0
    assert (out / "predictions.csv").read_bytes() == (tmp_path / "whole" / "predictions.csv").read_bytes()
    log = (out / "log.txt").read_text()  # one log: the first epoch, then the second
    assert "epoch [1/2]" in log and "epoch [2/2]" in log and not list(out.glob("log.txt-*"))


def test_bad_input_is_one_sentence(call_train, own_root, tmp_path, capsys):
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "log.txt").write_text("x")
    bad = own_root / "toy" / "red_thing" / "08.png"
    bad.write_bytes(bad.read_bytes()[:90])
    cases = [
        ({"trainer": "ToyMetod"}, (), "trainer 'ToyMetod' is unknown; did you mean 'ToyMethod'?"),
        ({"trainer": ""}, (), "no trainer is given: set --trainer to one of ToyMethod, ToyZeroShot"),
        ({}, ("DATASET.NAME", "Toys"), "data set 'Toys' is unknown; did you mean 'Toy'?"),
        ({}, ("OPTIM.LRR", "1"), "unknown config key OPTIM.LRR; did you mean OPTIM.LR?"),
        ({}, ("OPTIM.LR", "1", "--eval-only"), "overrides come in pairs KEY VALUE, after all flags"),
        ({}, ("--eval-only",), "evaluating ToyMethod needs a trained model: give its output folder as --model-dir"),
        ({}, ("--eval-only", "--model-dir", str(tmp_path / "no")), "no model folder"),
        ({}, ("--config-file", str(tmp_path / "metod.yaml")), f"did you mean {tmp_path / 'method.yaml'}?"),
        ({"out": "other"}, (), "holds a run that this program did not record"),
        ({"root": tmp_path}, (), "missing split file"),
        ({"root": own_root, "out": "broken"}, (), f"image {bad} cannot be read"),
        (
            {"root": own_root, "out": "worker", "trainer": "ToyZeroShot"},
            ("DATALOADER.NUM_WORKERS", "1"),
            f"image {bad} cannot be read",
        ),
        ({"out": "lr"}, ("OPTIM.LR", "1e38", "OPTIM.MAX_EPOCH", "9"), "lower OPTIM.LR"),
        ({"out": "bv"}, ("TEST.FINAL_MODEL", "best_val", "TOY.VAL", "False"), "Toy has no val images"),
    ]
    if ENGINE == "builtin":  # Dassl answers with an assertion
        sentence = "transform 'normalise' is unknown; did you mean 'normalize'?"
        cases.append(({"out": "tf"}, ("INPUT.TRANSFORMS", "('normalise',)"), sentence))
    for options, flags, sentence in cases:
        capsys.readouterr()
        code = call_train(*flags, **options)
        err = capsys.readouterr().err
        assert code == 2, (flags, err)
        assert err.startswith("error: ") and sentence in err and err.count("\n") == 1 and "Traceback" not in err, err


def test_traceback_is_in_the_log(call_train, own_root, out):
    for path in (own_root / "toy").glob("*/08.png"):
        path.write_bytes(b"no image")
    assert call_train(root=own_root) == 2
    assert "Traceback" in (out / "log.txt").read_text() and not (out / "result.json").exists()
    assert (
        call_train("DATASET.SKIP_BROKEN", "True", root=own_root) == 2
    )  # training is done: another setting is another run
    assert call_train("DATASET.SKIP_BROKEN", "True", root=own_root, out="skip") == 0
    assert len(read_result(out.parent / "skip")["skipped_images"]) == 3


def test_zero_shot_needs_no_flag(call_train, out, capsys):
    assert call_train(trainer="ToyZeroShot") == 0
    assert "ToyZeroShot has nothing to train: evaluating" in capsys.readouterr().out
    assert json.loads((out / "run.json").read_text())["identity"]["kind"] == "evaluation"


def test_no_train_writes_nothing(call_train, out):
    assert call_train("--no-train") == 0
    assert not out.exists()


def test_interrupt_by_hand(call_train, monkeypatch, capsys):
    def interrupt(*_):
        raise KeyboardInterrupt

    monkeypatch.setattr(ToyMethod, "forward_backward", interrupt)
    assert call_train() == 130
    assert "--resume" in capsys.readouterr().err


def test_repository_comes_first_on_the_path():
    code = (
        f"import sys; sys.path.insert(0, '/nowhere'); import runpy; runpy.run_path({str(SCRIPT)!r}); print(sys.path[0])"
    )
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert run.stdout.strip() == str(SCRIPT.parents[1])
