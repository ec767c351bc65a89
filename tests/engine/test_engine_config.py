"""The configuration tree: yacs' literal rules, number types, nearest keys, precedence helpers."""

import pytest
from yacs.config import CfgNode

from dear_plugin.engine import get_cfg_default
from dear_plugin.engine.config import own_tree


def write(tmp_path, text):
    path = tmp_path / "x.yaml"
    path.write_text(text, encoding="utf-8")
    return path


def test_defaults_of_the_contract():
    cfg = get_cfg_default()
    assert (cfg.SEED, cfg.RESUME, cfg.OUTPUT_DIR) == (-1, "", "./output")
    assert cfg.OPTIM.WEIGHT_DECAY == 5e-4 and cfg.OPTIM.SGD_DAMPNING == 0
    assert cfg.DATALOADER.TRAIN_X.BATCH_SIZE == 32 and cfg.INPUT.SIZE == (224, 224)
    assert cfg.TEST.FINAL_MODEL == "last_step" and cfg.DATASET.NUM_SHOTS == -1


def test_yaml_strings_are_read_as_literals(tmp_path):
    cfg = get_cfg_default()
    cfg.merge_from_file(
        write(tmp_path, "OPTIM:\n  LR: 1e-5\nINPUT:\n  SIZE: (64, 64)\nMODEL:\n  BACKBONE:\n    NAME: ViT-B/16\n")
    )
    assert cfg.OPTIM.LR == 1e-5 and cfg.INPUT.SIZE == (64, 64) and cfg.MODEL.BACKBONE.NAME == "ViT-B/16"


def test_numbers_lists_and_tuples():
    cfg = get_cfg_default()
    cfg.merge_from_list(
        ["OPTIM.LR", "1", "OPTIM.WEIGHT_DECAY", 0, "INPUT.TRANSFORMS", ["normalize"], "INPUT.PIXEL_MEAN", "(0.5,)"]
    )
    assert cfg.OPTIM.LR == 1.0 and type(cfg.OPTIM.LR) is float and type(cfg.OPTIM.WEIGHT_DECAY) is float
    assert cfg.INPUT.TRANSFORMS == ("normalize",) and cfg.INPUT.PIXEL_MEAN == [0.5]


@pytest.mark.parametrize(
    ("key", "value", "words"),
    [
        ("OPTIM.MAX_EPOCH", "2.5", ["OPTIM.MAX_EPOCH is float 2.5", "wanted int"]),
        ("OPTIM.LR", "True", ["OPTIM.LR is bool True", "wanted float"]),
        ("DATASET.NAME", "7", ["DATASET.NAME is int 7", "wanted str"]),
        ("OPTIM", "3", ["OPTIM is a group", "LR"]),
        ("OPTIM.LRR", "3", ["unknown config key OPTIM.LRR", "did you mean OPTIM.LR?"]),
        ("optim.lr", "3", ["command line: unknown config key optim.lr", "OPTIM.LR"]),
        ("OPTIM.LR.X", "3", ["OPTIM.LR is group", "wanted float"]),
    ],
)
def test_wrong_values_are_explained(key, value, words):
    with pytest.raises(ValueError) as caught:
        get_cfg_default().merge_from_list([key, value])
    assert all(word in str(caught.value) for word in words), caught.value


def test_odd_overrides():
    with pytest.raises(ValueError, match="pairs KEY VALUE, after all flags"):
        get_cfg_default().merge_from_list(["OPTIM.LR", "1", "--eval-only"])


def test_files_that_are_no_config(tmp_path):
    cfg = get_cfg_default()
    cfg.merge_from_file(write(tmp_path, "DATALOADER:\n"))  # a group whose lines are commented out changes nothing
    assert cfg == get_cfg_default()
    with pytest.raises(ValueError, match="x.yaml is not valid YAML"):
        get_cfg_default().merge_from_file(write(tmp_path, "A: [1"))
    with pytest.raises(FileNotFoundError, match="did you mean .*x.yaml"):
        get_cfg_default().merge_from_file(tmp_path / "y.yaml")


def test_frozen_and_foreign_nodes():
    cfg = get_cfg_default()
    cfg.TRAINER.COOP = CfgNode({"N_CTX": 16, "W": 0.5})  # trainers hang plain yacs nodes in
    cfg.merge_from_list(["TRAINER.COOP.N_CTX", "4", "TRAINER.COOP.W", "2"])
    assert cfg.TRAINER.COOP.N_CTX == 4 and cfg.TRAINER.COOP.W == 2.0
    copied = own_tree(cfg)
    cfg.freeze()
    with pytest.raises(AttributeError):
        cfg.merge_from_list(["SEED", "1"])
    copied.merge_from_list(["SEED", "1"])
    assert (copied.SEED, cfg.SEED) == (1, -1) and cfg.clone().OPTIM.LR == cfg.OPTIM.LR
