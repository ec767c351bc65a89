"""A method's life: repeatable, resumable to the bit, recorded, and stopped with a sentence where something is wrong."""

import csv
import json
import re
import shutil

import pytest
import torch
from engine_toys import Killed, read_result

from dear_plugin.engine import build_trainer, set_random_seed
from dear_plugin.engine.checkpoints import load_checkpoint


def train(cfg):
    trainer = build_trainer(cfg)
    trainer.train()
    return trainer


def weights(folder, name="model.pth.tar-4"):
    return load_checkpoint(folder / "toy_head" / name)


def equal(one, two):
    """Equal to the bit, through dicts and lists."""
    if isinstance(one, torch.Tensor):
        return torch.equal(one, two)
    if isinstance(one, dict):
        return one.keys() == two.keys() and all(equal(one[key], two[key]) for key in one)
    if isinstance(one, (list, tuple)):
        return len(one) == len(two) and all(map(equal, one, two))
    return one == two


RESULT_NOISE = {"started", "finished", "wall_time_s", "step_time_ms", "peak_memory_mib", "config", "loaded"}


def same_result(one, two):
    """Equal but for times, memory and folders."""
    return {k: v for k, v in one.items() if k not in RESULT_NOISE} == {
        k: v for k, v in two.items() if k not in RESULT_NOISE
    }


@pytest.fixture
def whole(make_cfg, tmp_path):
    """An uninterrupted run of four epochs."""
    train(make_cfg(out="whole"))
    return tmp_path / "whole"


def test_seeded_runs_repeat_exactly(make_cfg, tmp_path):
    for out in ("one", "two"):
        set_random_seed(1)  # as scripts/train.py does; the start of the weights is drawn at construction
        trainer = build_trainer(make_cfg(out=out))
        torch.rand(3 if out == "two" else 1)  # what is drawn between does not matter
        trainer.train()
    one, two = tmp_path / "one", tmp_path / "two"
    assert equal(weights(one), weights(two))
    assert (one / "predictions.csv").read_bytes() == (two / "predictions.csv").read_bytes()


@pytest.mark.parametrize(
    "stop", [6, 7, 10]
)  # three steps an epoch: after epoch 2, in the middle of 3, in the middle of 4
@pytest.mark.parametrize("final", ["last_step", "best_val"])
def test_resumed_equals_uninterrupted(make_cfg, tmp_path, stop, final):
    changes = ("TEST.FINAL_MODEL", final, "SEED", 3)
    torch.manual_seed(0)
    train(make_cfg(*changes, out="whole"))
    torch.manual_seed(0)
    stopped = build_trainer(make_cfg(*changes))
    stopped.kill_at = stop
    with pytest.raises(Killed):
        stopped.train()
    assert not (tmp_path / "out" / "result.json").exists()
    torch.manual_seed(99)
    resumed = train(make_cfg(*changes, "RESUME", str(tmp_path / "out")))
    assert resumed.start_epoch == stop // 3
    one, two = tmp_path / "whole", tmp_path / "out"
    assert equal(weights(one), weights(two))
    if final == "best_val":
        assert equal(weights(one, "model-best.pth.tar"), weights(two, "model-best.pth.tar"))
    assert (one / "predictions.csv").read_bytes() == (two / "predictions.csv").read_bytes()
    assert same_result(read_result(one), read_result(two))
    assert not (two / "resume_state.pt").exists()


def test_unseeded_run_resumes_with_its_own_generators(make_cfg, tmp_path):
    torch.manual_seed(5)
    stopped = build_trainer(make_cfg("SEED", -1))
    stopped.kill_at = 6
    with pytest.raises(Killed):
        stopped.train()
    shutil.copytree(tmp_path / "out", tmp_path / "copy")
    train(make_cfg("SEED", -1, "RESUME", str(tmp_path / "out")))
    torch.manual_seed(6)
    train(make_cfg("SEED", -1, "RESUME", str(tmp_path / "copy"), out="copy"))
    assert equal(weights(tmp_path / "out"), weights(tmp_path / "copy"))


def test_resume_into_another_folder_brings_the_best_epoch(make_cfg, tmp_path):
    changes = ("TEST.FINAL_MODEL", "best_val")
    stopped = build_trainer(make_cfg(*changes, out="a"))
    stopped.kill_at = 11
    with pytest.raises(Killed):
        stopped.train()
    train(make_cfg(*changes, "RESUME", str(tmp_path / "a"), out="b"))
    assert (tmp_path / "b" / "toy_head" / "model-best.pth.tar").is_file()
    assert read_result(tmp_path / "b")["loaded"]["toy_head"]["file"].endswith("b/toy_head/model-best.pth.tar")


def test_resume_refusals(make_cfg, tmp_path):
    stopped = build_trainer(make_cfg())
    stopped.kill_at = 6
    with pytest.raises(Killed):
        stopped.train()
    with pytest.raises(ValueError, match="interrupted run of the same settings: add --resume"):
        train(make_cfg())
    with pytest.raises(ValueError, match=r"cannot be continued by this run: OPTIM.LR is 0.1 there, 0.2 here"):
        train(make_cfg("OPTIM.LR", 0.2, "RESUME", str(tmp_path / "out"), out="other"))
    with pytest.raises(FileNotFoundError, match="has no resume_state.pt: nothing to continue"):
        train(make_cfg("RESUME", str(tmp_path / "nowhere"), out="third"))
    state = tmp_path / "out" / "resume_state.pt"
    state.write_bytes(state.read_bytes()[:200])
    with pytest.raises(ValueError, match="resume_state.pt cannot be read"):
        train(make_cfg("RESUME", str(tmp_path / "out")))


def test_resume_without_anything_done_starts(make_cfg, tmp_path):
    assert train(make_cfg("RESUME", str(tmp_path / "out"))).start_epoch == 0


def test_records(whole, make_cfg):
    result = read_result(whole)
    wanted = {
        "schema": 1,
        "status": "complete",
        "kind": "train",
        "trainer": "ToyMethod",
        "dataset": "Toy",
        "classes": "all",
        "shots": -1,
        "seed": 1,
        "split": "test",
        "total": 12,
        "epochs": 4,
        "steps": 12,
        "trainable_parameters": 12,
        "toy_fact": 1,
        "skipped_images": [],
        "images": {"train": 18, "val": 6, "test": 12},
    }
    assert {key: result[key] for key in wanted} == wanted
    assert result["accuracy_pct"] == 100.0 * result["correct"] / 12
    assert result["classnames"] == ["red_thing", "green_thing", "blue_thing"] and len(result["classnames_sha256"]) == 64
    assert sum(row["correct"] for row in result["per_class"]) == result["correct"]
    assert result["config"]["OPTIM.LR"] == 0.1 and result["config"]["INPUT.SIZE"] == [8, 8]
    assert result["step_time_ms"] > 0 and result["peak_memory_mib"] > 10 and result["versions"]["torch"]
    assert {"commit", "dirty"} == result["git"].keys()
    sample = result["zero_shot_sample"]
    assert (
        sample["images"] == 6
        and sample["source"] == "val"
        and sample["zero_shot_pct"] > 90
        and sample["final_pct"] is not None
    )
    with open(whole / "predictions.csv", newline="") as handle:
        rows = list(csv.DictReader(handle))
    assert (
        list(rows[0])[:4] == ["path", "true", "predicted", "probability"] and rows[0]["path"] == "toy/red_thing/08.png"
    )
    assert sum(row["true_label"] == row["predicted_label"] for row in rows) == result["correct"]
    assert not list(whole.glob(".*tmp"))


def test_log_lines(make_cfg, capsys):
    train(make_cfg("OPTIM.MAX_EPOCH", 2))
    out = capsys.readouterr().out
    line = (
        r"epoch \[1/2\] batch \[1/3\] time \d+\.\d{3} \(\d+\.\d{3}\) data \d+\.\d{3} \(\d+\.\d{3}\) "
        r"loss \d+\.\d{4} \(\d+\.\d{4}\) acc \d\.\d{4} \(\d\.\d{4}\) lr 1\.0000e-05 eta \d:\d\d:\d\d"
    )
    assert re.search(f"^{line}$", out, re.MULTILINE)
    assert re.search(r"batch \[3/3\] .* lr 1.0000e-01", out)  # the last batch shows the next epoch's rate
    order = [
        "No checkpoint found, train from scratch",
        "Prompt: a photo of a red thing.",
        "Zero-shot accuracy on 6 val images",
        "Checkpoint saved to",
        "Finish training",
        "Deploy the last-epoch model",
        "Evaluate on the *test* set",
        "=> result",
        "* accuracy: ",
        "Elapsed: ",
    ]
    places = [out.index(text) for text in order]
    assert places == sorted(places)


def test_checkpoint_frequency_and_plain_content(make_cfg, tmp_path):
    train(make_cfg("TRAIN.CHECKPOINT_FREQ", 3))
    names = {path.name for path in (tmp_path / "out" / "toy_head").iterdir()}
    assert names == {"model.pth.tar-3", "model.pth.tar-4", "checkpoint"}
    state = torch.load(tmp_path / "out" / "toy_head" / "model.pth.tar-4", weights_only=True)
    assert set(state) == {"state_dict", "epoch", "optimizer", "scheduler", "val_result"} and state["epoch"] == 4


def test_finished_folder_is_left_alone(whole, make_cfg, capsys):
    before = (whole / "result.json").read_bytes()
    train(make_cfg(out="whole"))
    assert "is finished: accuracy" in capsys.readouterr().out and (whole / "result.json").read_bytes() == before


@pytest.mark.parametrize("left", [0, 200])
def test_a_result_that_was_cut_off_is_made_again(left, make_cfg, tmp_path, capsys):
    train(make_cfg())
    file = tmp_path / "out" / "result.json"
    before = json.loads(file.read_text())
    file.write_bytes(file.read_bytes()[:left])
    train(make_cfg())
    again = json.loads(file.read_text())
    assert "was cut off (now result.json.broken): running again" in capsys.readouterr().out
    assert (again["correct"], again["per_class"]) == (before["correct"], before["per_class"])
    assert (tmp_path / "out" / "result.json.broken").stat().st_size == left


def test_other_runs_folder_is_refused(whole, make_cfg):
    with pytest.raises(
        ValueError, match=r"belongs to another run: seed is 1 there, 2 here\. Give another --output-dir"
    ):
        train(make_cfg("SEED", 2, out="whole"))
    with pytest.raises(ValueError, match=r"OPTIM.LR is 0.1 there, 0.3 here"):
        train(make_cfg("OPTIM.LR", 0.3, out="whole"))
    with pytest.raises(ValueError, match=r"classes is 'all' there, 'new' here"):
        train(make_cfg("DATASET.SUBSAMPLE_CLASSES", "new", out="whole"))
    with pytest.raises(ValueError, match=r"kind is 'train' there, 'evaluation' here"):
        build_trainer(make_cfg(out="whole")).evaluate(str(whole))
    (whole / "run.json").unlink()
    with pytest.raises(ValueError, match="holds a run that this program did not record"):
        train(make_cfg(out="whole"))


def test_settings_that_change_nothing_do_not_matter(whole, make_cfg, own_root, capsys):
    train(make_cfg("TRAIN.PRINT_FREQ", 3, out="whole", root=own_root))
    assert "is finished" in capsys.readouterr().out


def test_folder_of_a_run_that_made_nothing_can_be_used(make_cfg, tmp_path):
    stopped = build_trainer(make_cfg("OPTIM.LR", 0.3))
    stopped.kill_at = 1
    with pytest.raises(Killed):
        stopped.train()
    train(make_cfg())
    assert read_result(tmp_path / "out")["config"]["OPTIM.LR"] == 0.1


def test_evaluation(whole, make_cfg, tmp_path, capsys):
    trainer = build_trainer(make_cfg("DATASET.SUBSAMPLE_CLASSES", "new", out="eval"))
    accuracy = trainer.evaluate(str(whole))
    result, trained = read_result(tmp_path / "eval"), read_result(whole)
    assert accuracy == result["accuracy_pct"] == trained["accuracy_pct"]
    assert (
        result["kind"] == "evaluation"
        and result["classes"] == "new"
        and result["split"] == "test"
        and result["steps"] == 0
    )
    loaded = result["loaded"]["toy_head"]
    assert loaded["file"].endswith("model.pth.tar-4") and loaded["epoch"] == 4 and len(loaded["sha256"]) == 64
    assert "into toy_head: epoch 4, 2 tensors" in capsys.readouterr().out


def test_evaluation_needs_the_right_model(whole, make_cfg, tmp_path):
    def evaluate(directory, *changes, epoch=None):
        build_trainer(make_cfg(*changes, out="eval")).evaluate(directory, epoch=epoch)

    with pytest.raises(ValueError, match="evaluating ToyMethod needs a trained model.*--model-dir"):
        evaluate("")
    with pytest.raises(FileNotFoundError, match="no model folder"):
        evaluate(str(tmp_path / "nowhere"))
    with pytest.raises(FileNotFoundError, match="no checkpoint of epoch 3; epochs there: 4"):
        evaluate(str(whole), epoch=3)
    with pytest.raises(FileNotFoundError, match="epochs there: 4"):
        evaluate(str(whole), epoch=0)
    with pytest.raises(ValueError, match="trained with backbone '', this run has 'tiny'"):
        evaluate(str(whole), "MODEL.BACKBONE.NAME", "tiny")
    state = weights(whole)
    state["state_dict"]["head.bias"] = torch.zeros(5)
    torch.save(state, whole / "toy_head" / "model.pth.tar-4")
    with pytest.raises(ValueError, match=r"model.pth.tar-4: .*head.bias has shape \[5\] in the file, \[3\] here"):
        evaluate(str(whole))


def test_zero_shot_needs_nothing_and_does_not_train(make_cfg, tmp_path):
    cfg = make_cfg("TRAINER.NAME", "ToyZeroShot")
    with pytest.raises(ValueError, match="ToyZeroShot has nothing to train: use --eval-only"):
        train(cfg)
    build_trainer(cfg).evaluate()
    result = read_result(tmp_path / "out")
    assert result["loaded"] == {} and result["trainable_parameters"] == 0 and result["accuracy_pct"] > 90


def test_best_val_wants_val_images(make_cfg):
    with pytest.raises(ValueError, match="TEST.FINAL_MODEL is best_val, but Toy has no val images"):
        build_trainer(make_cfg("TEST.FINAL_MODEL", "best_val", "TOY.VAL", False))
    with pytest.raises(ValueError, match="TEST.FINAL_MODEL is 'best'; allowed: last_step, best_val"):
        build_trainer(make_cfg("TEST.FINAL_MODEL", "best"))
    with pytest.raises(ValueError, match="split 'val' cannot be evaluated: this data has test"):
        build_trainer(make_cfg("TOY.VAL", False)).test(split="val")


def test_fewer_images_than_a_batch_trains_and_says_so(make_cfg, tmp_path, capsys):
    train(make_cfg("TOY.ONE_EACH", True, "DATALOADER.TRAIN_X.BATCH_SIZE", 32))
    assert "train_x has 3 images, fewer than DATALOADER.TRAIN_X.BATCH_SIZE 32" in capsys.readouterr().out
    assert read_result(tmp_path / "out")["steps"] == 4


def test_no_steps_is_an_error(make_cfg):
    with pytest.raises(ValueError, match="OPTIM.MAX_EPOCH is 0: no step would be made"):
        build_trainer(make_cfg("OPTIM.MAX_EPOCH", 0))
    trainer = build_trainer(make_cfg())
    trainer.train_loader_x = []
    with pytest.raises(ValueError, match="an epoch has no steps"):
        trainer.train()


def test_label_gaps(make_cfg):
    with pytest.raises(ValueError, match="test has labels without a training image: 1, 2"):
        build_trainer(make_cfg("TOY.TRAIN_IMAGES", 6, "TOY.VAL", False))


def test_infinite_pixel_names_the_image(make_cfg):
    with pytest.raises(
        FloatingPointError,
        match=r"step 5 \(epoch 2, batch 2\): loss term 'ce' is not finite; the input is not "
        r"finite in .*_thing/\d\d.png: replace",
    ):
        train(make_cfg("TOY.POISON", 4))


def test_absurd_rate_names_the_parameter_and_the_setting(make_cfg):
    with pytest.raises(FloatingPointError, match=r"(toy_head\.head\.(weight|bias)).*(lower OPTIM.LR)"):
        train(make_cfg("OPTIM.LR", 1e38, "OPTIM.MAX_EPOCH", 8))


def test_half_precision_parameters_are_refused(make_cfg):
    trainer = build_trainer(make_cfg())
    with pytest.raises(ValueError, match="trainable parameter x.weight is torch.float16; keep it in float32"):
        trainer.register_model("x", torch.nn.Linear(2, 2).to(torch.float16))


def test_worse_than_zero_shot_is_said(make_cfg, capsys):
    train(make_cfg("OPTIM.LR", 0.0, "OPTIM.MAX_EPOCH", 1))
    assert "below zero-shot" in capsys.readouterr().out


def test_facts_may_not_replace_shared_fields(make_cfg):
    trainer = build_trainer(make_cfg("OPTIM.MAX_EPOCH", 1))
    trainer.run_facts = lambda: {"seed": 7}
    with pytest.raises(ValueError, match="run_facts\\(\\) may not replace the shared fields seed"):
        trainer.train()


def test_bars_only_on_a_terminal(make_cfg, capsys, monkeypatch):
    import sys

    train(make_cfg("OPTIM.MAX_EPOCH", 1))
    assert capsys.readouterr().err == ""
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True, raising=False)
    train(make_cfg("OPTIM.MAX_EPOCH", 1, out="two"))
    err = capsys.readouterr().err
    assert "epoch 1/1" in err and "evaluate test" in err
