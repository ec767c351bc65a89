"""Checkpoint files: layout, plain content, readable errors, old files of a real Dassl; and the log file."""

import os
import time

import pytest
import torch
from torch import nn

from dear_plugin.engine import load_checkpoint, load_pretrained_weights, save_checkpoint, setup_logger
from dear_plugin.engine.checkpoints import find_checkpoint, load_strictly
from dear_plugin.engine.system import close_logger, collect_env_info


def state_of(epoch=1):
    return {
        "state_dict": {"module.w": torch.ones(2)},
        "epoch": epoch,
        "optimizer": None,
        "scheduler": None,
        "val_result": None,
    }


def test_layout(tmp_path):
    for epoch in (1, 2):
        save_checkpoint(state_of(epoch), tmp_path / "m")
    save_checkpoint(state_of(2), tmp_path / "m", model_name="model-best.pth.tar")
    names = {path.name for path in (tmp_path / "m").iterdir()}
    assert names == {"model.pth.tar-1", "model.pth.tar-2", "model-best.pth.tar", "checkpoint"}
    assert (tmp_path / "m" / "checkpoint").read_text() == "model-best.pth.tar\n"
    read = torch.load(tmp_path / "m" / "model.pth.tar-2", weights_only=True)
    assert list(read["state_dict"]) == ["w"] and read["epoch"] == 2


def test_find(tmp_path):
    with pytest.raises(FileNotFoundError, match="no model folder"):
        find_checkpoint(tmp_path / "no", "m")
    save_checkpoint(state_of(1), tmp_path / "other")
    with pytest.raises(FileNotFoundError, match="has no checkpoint of m; it holds other"):
        find_checkpoint(tmp_path, "m")
    for epoch in (2, 10):
        save_checkpoint(state_of(epoch), tmp_path / "m")
    assert find_checkpoint(tmp_path, "m").name == "model.pth.tar-10"
    assert find_checkpoint(tmp_path, "m", 2).name == "model.pth.tar-2"
    for epoch in (0, 3):
        with pytest.raises(FileNotFoundError, match=f"no checkpoint of epoch {epoch}; epochs there: 2, 10"):
            find_checkpoint(tmp_path, "m", epoch)
    save_checkpoint(state_of(2), tmp_path / "m", model_name="model-best.pth.tar")
    assert find_checkpoint(tmp_path, "m").name == "model-best.pth.tar"


def test_damaged_file(tmp_path):
    path = tmp_path / "x"
    torch.save(state_of(), path)
    path.write_bytes(path.read_bytes()[:-50])
    with pytest.raises(ValueError, match="cannot be read: it is damaged"):
        load_checkpoint(path)


def test_checkpoint_of_an_old_dassl_is_read(tmp_path):
    """Its scheduler entry is an object that holds the optimizer."""
    model = nn.Linear(2, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    model(torch.ones(1, 2)).sum().backward()
    optimizer.step()
    successor = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 5)
    old = {
        "state_dict": model.state_dict(),
        "epoch": 3,
        "optimizer": optimizer.state_dict(),
        "val_result": None,
        "scheduler": {"successor": successor, "warmup_epoch": 1},
    }
    torch.save(old, tmp_path / "old")
    if hasattr(torch.serialization, "safe_globals"):
        with pytest.raises(Exception, match="[Ww]eights"):
            torch.load(tmp_path / "old", weights_only=True)
        assert load_checkpoint(tmp_path / "old")["epoch"] == 3


def test_code_in_a_file_is_not_run(tmp_path):
    class Evil:
        def __reduce__(self):
            return os.system, (f"touch {tmp_path / 'ran'}",)

    torch.save({"state_dict": Evil()}, tmp_path / "evil")
    with pytest.raises(ValueError, match="objects other than tensors"):
        load_checkpoint(tmp_path / "evil")
    assert not (tmp_path / "ran").exists()


def test_strict_loading_reports_everything():
    with pytest.raises(ValueError) as caught:
        load_strictly(nn.Linear(2, 3), {"weight": torch.ones(4, 2), "ctx": torch.ones(1)}, source="file x")
    message = str(caught.value)
    assert "file x" in message and "missing bias" in message and "unexpected ctx" in message
    assert "weight has shape [4, 2] in the file, [3, 2] here" in message


def test_tolerant_loading(tmp_path, capsys):
    model = nn.Linear(2, 3)
    torch.save({"state_dict": {"module.weight": torch.ones(3, 2), "bias": torch.ones(9)}}, tmp_path / "w")
    load_pretrained_weights(model, tmp_path / "w")
    assert model.weight.eq(1).all() and "Not loaded, for their name or shape: bias" in capsys.readouterr().out
    torch.save({"x": torch.ones(1)}, tmp_path / "w")
    with pytest.warns(UserWarning, match="no entry fits"):
        load_pretrained_weights(model, tmp_path / "w")


def test_newest_log_is_log_txt(tmp_path, capsys):
    for number in (1, 2, 3):
        setup_logger(tmp_path, append=number == 3)
        print(f"run {number}")
        close_logger()
    assert (tmp_path / "log.txt").read_text() == "run 2\nrun 3\n"
    (old,) = tmp_path.glob("log.txt-*")
    assert old.read_text() == "run 1\n" and old.name.startswith(f"log.txt-{time.strftime('%Y')}")
    assert capsys.readouterr().out == "run 1\nrun 2\nrun 3\n"


def test_log_path_with_a_suffix(tmp_path):
    setup_logger(tmp_path / "my.log")
    print("x")
    close_logger()
    assert (tmp_path / "my.log").read_text() == "x\n"


def test_environment_report_is_quick():
    start = time.time()
    assert "torch: " in collect_env_info() and time.time() - start < 1
