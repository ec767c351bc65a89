"""The YAML files of the published methods: they build, fit their data sets, and hold the published values."""

from __future__ import annotations

import pytest
import yaml

from datasets.table import ROWS
from scripts import train as train_script

PUBLISHED = {
    "CoCoOp": ["tiny", "vit_b16_c16_ep10_batch1", "vit_b16_c4_ep10_batch1", "vit_b16_c4_ep10_batch1_ctxv1",
               "vit_b16_c8_ep10_batch1"],
    "MaPLe": ["tiny", "vit_b16_c2_ep5_batch4_2ctx", "vit_b16_c2_ep5_batch4_2ctx_cross_datasets"],
    "PromptSRC": ["tiny", "vit_b16_c2_ep20_batch4_4+4ctx", "vit_b16_c2_ep20_batch4_4+4ctx_cross_datasets",
                  "vit_b16_c2_ep50_batch4_4+4ctx_few_shot"],
    "MMRL": ["tiny", "vit_b16", "vit_b16_cross_datasets", "vit_b16_few_shot", "vit_b16_imagenet"],
}
FILES = [(method, stem) for method, stems in PUBLISHED.items() for stem in stems]


def cfg_of(method: str, stem: str, data: str, *pairs: str):
    return train_script.build_config(train_script.parse_arguments([
        "--trainer", method, "--config-file", f"configs/trainers/{method}/{stem}.yaml", "--dataset-config-file",
        f"configs/datasets/{data}.yaml", *pairs]))


def test_the_list_is_complete(root):
    found = {method: sorted(path.stem for path in (root / "configs" / "trainers" / method).glob("*.yaml"))
             for method in PUBLISHED}
    assert found == PUBLISHED and len(FILES) == 17


@pytest.mark.parametrize(("method", "stem"), FILES)
def test_each_builds_a_config(method, stem, root):
    cfg = cfg_of(method, stem, "caltech101")
    assert "PER_DATASET" not in cfg and cfg.OPTIM.LR_SCHEDULER == "cosine"
    raw = yaml.safe_load((root / "configs" / "trainers" / method / f"{stem}.yaml").read_text())
    assert set(raw.get("PER_DATASET", {})) <= {row.name for row in ROWS}


@pytest.mark.parametrize(("data", "weight", "width"), [
    ("imagenet", 0.5, 512), ("caltech101", 0.5, 512), ("oxford_pets", 0.2, 512), ("stanford_cars", 7.0, 512),
    ("oxford_flowers", 4.0, 512), ("food101", 5.0, 512), ("fgvc_aircraft", 6.0, 512), ("sun397", 6.0, 512),
    ("dtd", 6.0, 512), ("eurosat", 0.01, 2048), ("ucf101", 3.0, 512), ("imagenet_r", 1.0, 512)])
def test_mmrl_values_of_each_data_set(data, weight, width):
    node = cfg_of("MMRL", "vit_b16", data).TRAINER.MMRL
    assert (node.REG_WEIGHT, node.REP_DIM) == (weight, width)


@pytest.mark.parametrize(("data", "values"), [
    *((name, (45, 5)) for name in ("stanford_cars", "oxford_flowers", "fgvc_aircraft", "dtd", "eurosat")),
    *((name, (30, 30)) for name in ("imagenet", "caltech101", "oxford_pets", "food101", "ucf101", "sun397"))])
def test_promptsrc_few_shot_averages(data, values):
    node = cfg_of("PromptSRC", "vit_b16_c2_ep50_batch4_4+4ctx_few_shot", data).TRAINER.PROMPTSRC
    assert (node.GPA_MEAN, node.GPA_STD) == values


def test_values_of_a_data_set_are_weaker_than_the_command_line():
    cfg = cfg_of("MMRL", "vit_b16", "eurosat", "TRAINER.MMRL.REP_DIM", "512")
    assert (cfg.TRAINER.MMRL.REG_WEIGHT, cfg.TRAINER.MMRL.REP_DIM) == (0.01, 512)


def test_a_wrong_key_in_per_dataset_is_named(tmp_path):
    file = tmp_path / "m.yaml"
    file.write_text("PER_DATASET:\n  DescribableTextures:\n    TRAINER:\n      MMRL:\n        REG_WEIGTH: 2\n")
    with pytest.raises(ValueError, match="key TRAINER.MMRL.REG_WEIGTH; did you mean TRAINER.MMRL.REG_WEIGHT"):
        train_script.build_config(train_script.parse_arguments([
            "--config-file", str(file), "--dataset-config-file", "configs/datasets/dtd.yaml"]))


def test_whole_numbers_are_taken_for_fractions():
    pairs = {"PROMPTSRC.GPA_MEAN": "7", "PROMPTSRC.TEXT_LOSS_WEIGHT": "12.5", "MMRL.REG_WEIGHT": "2"}
    flat = [part for key, value in pairs.items() for part in (f"TRAINER.{key}", value)]
    cfg = cfg_of("PromptSRC", "tiny", "dtd", *flat)
    assert cfg.TRAINER.PROMPTSRC.GPA_MEAN == 7.0 and cfg.TRAINER.PROMPTSRC.TEXT_LOSS_WEIGHT == 12.5
    assert isinstance(cfg.TRAINER.MMRL.REG_WEIGHT, float)
