"""The table: one row a data set, under CoOp's names, folders and split files."""

from __future__ import annotations

import difflib

from datasets.generate import (
    CALTECH_IGNORED,
    CALTECH_NAMES,
    EUROSAT_NAMES,
    by_folders,
    make_cars,
    make_flowers,
    make_pets,
    make_sun397,
    make_ucf101,
)
from datasets.readers import (
    read_aircraft,
    read_imagenet,
    read_imagenet_v2,
    read_imagenet_variant,
    read_listed,
    read_published,
    read_shapes,
    read_shapes_variant,
    read_tree,
)
from datasets.row import OPTIONS, Row

# Counts are train, val, test, classes as published with CoOp; the prompts are in dear_plugin/engine/templates.py. Where
# images is "", the paths in the split begin with an image folder of their own.
ROWS = (
    Row("Caltech101", "caltech101", "caltech-101", read_published, images="101_ObjectCategories",
        split_file="split_zhou_Caltech101.json", counts=(4128, 1649, 2465, 100),
        make=by_folders("101_ObjectCategories", names=CALTECH_NAMES, ignored=CALTECH_IGNORED),
        names_hash="84f9ff49dce58ae6"),
    Row("OxfordPets", "oxford_pets", "oxford_pets", read_published, split_file="split_zhou_OxfordPets.json",
        make=make_pets, counts=(2944, 736, 3669, 37),
        names_hash="8e35ab44db27d55a"),
    Row("StanfordCars", "stanford_cars", "stanford_cars", read_published, images="",
        split_file="split_zhou_StanfordCars.json", make=make_cars, counts=(6509, 1635, 8041, 196),
        names_hash="2caca90b5c02b65f"),
    Row("OxfordFlowers", "oxford_flowers", "oxford_flowers", read_published, images="jpg",
        split_file="split_zhou_OxfordFlowers.json", make=make_flowers,
        counts=(4093, 1633, 2463, 102), names_hash="0d27092c2140383d"),
    Row("Food101", "food101", "food-101", read_published, split_file="split_zhou_Food101.json",
        make=by_folders("images"), counts=(50500, 20200, 30300, 101),
        names_hash="efe7060c0e6aa88c"),
    Row("FGVCAircraft", "fgvc_aircraft", "fgvc_aircraft", read_aircraft,
        counts=(3334, 3333, 3333, 100), names_hash="e1c9e72060e63d52"),
    Row("SUN397", "sun397", "sun397", read_published, images="SUN397", split_file="split_zhou_SUN397.json",
        make=make_sun397, counts=(15880, 3970, 19850, 397), names_hash="583c0fad85d22c56"),
    Row("DescribableTextures", "dtd", "dtd", read_published, split_file="split_zhou_DescribableTextures.json",
        make=by_folders("images"), counts=(2820, 1128, 1692, 47),
        names_hash="681d23b9cd3c2ede"),
    Row("EuroSAT", "eurosat", "eurosat", read_published, images="2750", split_file="split_zhou_EuroSAT.json",
        make=by_folders("2750", names=EUROSAT_NAMES),
        counts=(13500, 5400, 8100, 10), names_hash="bcff3a8022b63397"),
    Row("UCF101", "ucf101", "ucf101", read_published, images="UCF-101-midframes", split_file="split_zhou_UCF101.json",
        make=make_ucf101, counts=(7639, 1898, 3783, 101),
        names_hash="d22e81fba7ebebf0"),
    Row("ImageNet", "imagenet", "imagenet", read_imagenet, counts=(1281167, 50000, 50000, 1000),
        names_hash="571ae1c583b4be7d"),
    Row("ImageNetV2", "imagenetv2", "imagenetv2", read_imagenet_v2,
        images="imagenetv2-matched-frequency-format-val", test_only=True,
        counts=(10000, 0, 10000, 1000), names_hash="571ae1c583b4be7d"),
    Row("ImageNetSketch", "imagenet_sketch", "imagenet-sketch", read_imagenet_variant, test_only=True,
        counts=(50889, 0, 50889, 1000), names_hash="571ae1c583b4be7d"),
    Row("ImageNetA", "imagenet_a", "imagenet-adversarial", read_imagenet_variant, images="imagenet-a", test_only=True,
        counts=(7500, 0, 7500, 200), names_hash="4b36c17b1b1bba6c"),
    Row("ImageNetR", "imagenet_r", "imagenet-rendition", read_imagenet_variant, images="imagenet-r", test_only=True,
        counts=(30000, 0, 30000, 200), names_hash="79cac199a9146841"),
    Row("Shapes", "shapes", "shapes", read_shapes, split_file="split_zhou_Shapes.json"),
    Row("ShapesResampled", "shapes_resampled", "shapes-resampled", read_shapes_variant, test_only=True),
    Row("ShapesSketch", "shapes_sketch", "shapes-sketch", read_shapes_variant, test_only=True),
    Row("ShapesHard", "shapes_hard", "shapes-hard", read_shapes_variant, test_only=True),
    Row("ShapesRendition", "shapes_rendition", "shapes-rendition", read_shapes_variant, test_only=True),
    Row("ShapesColor", "shapes_color", "shapes-color", read_shapes_variant, test_only=True),
    Row("ShapesEntity", "shapes_entity", "shapes-entity", read_shapes_variant, test_only=True),
    Row("ShapesTexture", "shapes_texture", "shapes-texture", read_shapes_variant, test_only=True),
    Row("ShapesLocation", "shapes_location", "shapes-location", read_shapes_variant, test_only=True),
    Row("Folder", "folder", "", read_tree, images=""),
    Row("List", "list", "", read_listed, images=""),
)


def row_for(name: str) -> Row:
    """The row called `name` (DATASET.NAME); ValueError with the nearest name, and how to use own images."""
    by_name = {row.name: row for row in ROWS}
    if name not in by_name:
        near = difflib.get_close_matches(name, by_name, n=1, cutoff=0.0)[0]
        raise ValueError(f"DATASET.NAME {name!r} is unknown, did you mean {near}? Known: {', '.join(by_name)}. For "
                         "images of your own use Folder with --root set to the folder that holds the class folders, or "
                         "List for a CSV file")
    return by_name[name]


def extend_cfg(cfg) -> None:
    """Add this package's settings under DATASET, see `row.OPTIONS`."""
    for name, default in OPTIONS.items():
        cfg.DATASET[name] = default


def register_all() -> None:
    """Make every row known to the harness by its name; may be called again.

    An explicit call, not an import's side effect: CoOp's own modules register the same names, and a name can be taken
    once. The harness is imported here, so that a script which only looks at the table does not load torch.
    """
    from datasets.dataset import TableDataset
    from dear_plugin.engine import DATASET_REGISTRY

    taken = DATASET_REGISTRY.registered_names()
    for row in ROWS:
        if row.name not in taken:
            made = type(row.name, (TableDataset,), {"row": row, "__doc__": f"{row.name}, see table.py."})
            DATASET_REGISTRY.register()(made)
        elif getattr(DATASET_REGISTRY.get(row.name), "row", None) != row:
            raise ValueError(f"another module has already registered the data set {row.name}: "
                             "import either its data sets or ours")
