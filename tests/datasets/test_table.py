"""The table: every row has its config file, prompts are CoOp's, registration is explicit."""

from __future__ import annotations

import subprocess
import sys

import pytest
import yaml
from yacs.config import CfgNode

from datasets.row import OPTIONS
from datasets.table import ROWS, extend_cfg, register_all, row_for
from dear_plugin.engine.templates import TEMPLATES, template_for

# One finished prompt a row, for the class "great_white" as CoOp's zero-shot trainer writes it.
PROMPTS = {
    "Caltech101": "a photo of a great white.",
    "OxfordPets": "a photo of a great white, a type of pet.",
    "StanfordCars": "a photo of a great white.",
    "OxfordFlowers": "a photo of a great white, a type of flower.",
    "Food101": "a photo of great white, a type of food.",
    "FGVCAircraft": "a photo of a great white, a type of aircraft.",
    "SUN397": "a photo of a great white.",
    "DescribableTextures": "great white texture.",
    "EuroSAT": "a centered satellite photo of great white.",
    "UCF101": "a photo of a person doing great white.",
    "ImageNet": "a photo of a great white.",
    "ImageNetV2": "a photo of a great white.",
    "ImageNetSketch": "a photo of a great white.",
    "ImageNetA": "a photo of a great white.",
    "ImageNetR": "a photo of a great white.",
    "Shapes": "a photo of a great white.",
    "ShapesResampled": "a photo of a great white.",
    "ShapesSketch": "a photo of a great white.",
    "ShapesHard": "a photo of a great white.",
    "ShapesRendition": "a photo of a great white.",
    "ShapesColor": "a photo of a great white thing.",
    "ShapesEntity": "a photo of a great white.",
    "ShapesTexture": "a photo of a great white thing.",
    "ShapesLocation": "a photo of a thing in the great white.",
    "Folder": "a photo of a great white.",
    "List": "a photo of a great white.",
}


def cfg_of(name: str, **options) -> CfgNode:
    cfg = CfgNode({"DATASET": {"NAME": name, "ROOT": "", "NUM_SHOTS": -1}})
    extend_cfg(cfg)
    for key, value in options.items():
        cfg.DATASET[key] = value
    return cfg


def test_every_config_file_names_its_row(root):
    files = {
        file.stem: yaml.safe_load(file.read_text(encoding="utf-8"))
        for file in (root / "configs" / "datasets").glob("*.yaml")
    }
    assert len(files) == len(ROWS) == 26
    assert files == {row.config: {"DATASET": {"NAME": row.name}} for row in ROWS}


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row.name)
def test_prompts(row):
    assert template_for(cfg_of(row.name)).format("great_white".replace("_", " ")) == PROMPTS[row.name]


def test_template_of_the_config_wins():
    assert template_for(cfg_of("EuroSAT", TEMPLATE="from above: {}")) == "from above: {}"
    with pytest.raises(ValueError, match=r"DATASET.TEMPLATE is 'no place': it needs \{\} where the class name goes"):
        template_for(cfg_of("EuroSAT", TEMPLATE="no place"))
    assert template_for(cfg_of("SomebodysOwn")) == "a photo of a {}."
    assert set(TEMPLATES) <= {row.name for row in ROWS}


def test_options_are_added_and_merge_from_a_command_line():
    cfg = cfg_of("EuroSAT")
    assert {key: cfg.DATASET[key] for key in OPTIONS} == OPTIONS
    cfg.merge_from_list(["DATASET.SUBSAMPLE_CLASSES", "new", "DATASET.MAKE_SPLIT", "True", "DATASET.SPLIT_SEED", "4"])
    assert (cfg.DATASET.SUBSAMPLE_CLASSES, cfg.DATASET.MAKE_SPLIT, cfg.DATASET.SPLIT_SEED) == ("new", True, 4)


def test_a_config_without_the_options_still_loads(eurosat):
    from dear_plugin.engine import DATASET_REGISTRY

    register_all()
    root, _ = eurosat({"a": 2, "b": 2})
    cfg = CfgNode({"SEED": 1, "OUTPUT_DIR": "", "DATASET": {"NAME": "EuroSAT", "ROOT": str(root), "NUM_SHOTS": 1}})
    assert len(DATASET_REGISTRY.get("EuroSAT")(cfg).train_x) == 2


def test_registering_twice_is_harmless_and_names_are_coops():
    from dear_plugin.engine import DATASET_REGISTRY

    register_all()
    register_all()
    assert {row.name for row in ROWS} <= set(DATASET_REGISTRY.registered_names())
    assert DATASET_REGISTRY.get("DescribableTextures").__name__ == "DescribableTextures"


def test_another_module_with_our_names_is_named(monkeypatch):
    import dear_plugin.engine as engine

    class Taken:
        def registered_names(self):
            return ["OxfordPets"]

        def get(self, name):
            return object

        def register(self):
            return lambda made: made

    monkeypatch.setattr(engine, "DATASET_REGISTRY", Taken())
    with pytest.raises(
        ValueError,
        match="another module has already registered the data set OxfordPets: import either its data sets or ours",
    ):
        register_all()


def test_unknown_name_gets_the_nearest_and_the_way_to_own_images():
    assert row_for("EuroSAT").config == "eurosat"
    with pytest.raises(
        ValueError,
        match=r"DATASET.NAME 'EuroSat' is unknown, did you mean EuroSAT\? Known: Caltech101, .* "
        "For images of your own use Folder with --root set to the folder that holds the class folders",
    ):
        row_for("EuroSat")


def test_looking_at_the_table_loads_neither_torch_nor_the_renderer(root):
    heavy = ("torch", "yacs", "PIL", "scipy", "datasets.shapes")
    code = f"import sys, datasets.table; print([m for m in {heavy} if m in sys.modules])"
    shown = subprocess.run([sys.executable, "-c", code], cwd=root, capture_output=True, text=True, check=True)
    assert shown.stdout.strip() == "[]"


def test_the_shapes_row_writes_its_data_on_first_use(load, tmp_path, monkeypatch):
    from datasets import shapes_benchmark

    monkeypatch.setattr(shapes_benchmark, "COUNTS", {"train": 2, "val": 1, "test": 1})
    data = load("Shapes", tmp_path / "data", shots=1)
    assert len(data.train_x) == data.num_classes >= 40
    assert data.facts["split_generated"] is False and data.facts["published_split"] is None
