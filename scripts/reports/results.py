"""Reading result.json files, and sorting them into one cell for each protocol, data set, trainer, shots and seed."""

from __future__ import annotations

import json
import statistics
from collections import defaultdict
from pathlib import Path

ORDER = ("ZeroshotCLIP", "CoOp", "CoCoOp", "MaPLe", "PromptSRC", "MMRL", "DeAR")
DOMAINS = ("ImageNetV2", "ImageNetSketch", "ImageNetA", "ImageNetR", "ShapesResampled", "ShapesSketch", "ShapesHard",
           "ShapesRendition")  # fmt: skip
ELEVEN = ("ImageNet", "Caltech101", "OxfordPets", "StanfordCars", "OxfordFlowers", "Food101", "FGVCAircraft", "SUN397",
          "DescribableTextures", "EuroSAT", "UCF101")  # fmt: skip
SHAPES_TARGETS = ("ShapesColor", "ShapesEntity", "ShapesTexture", "ShapesLocation")
TARGETS = {  # (protocol, family) -> every target of it, in the order of the columns
    ("xd", "ImageNet"): ELEVEN[1:],
    ("dg", "ImageNet"): DOMAINS[:4],
    ("xd", "Shapes"): SHAPES_TARGETS,
    ("dg", "Shapes"): DOMAINS[4:],
}
Seeds = dict[int, dict]  # seed -> result
MISSING = "missing"


def read_results(folder: Path) -> tuple[list[dict], list[str]]:
    """Finished results with a test accuracy, and a sentence for each file that could not be read."""
    results, broken = [], []
    for path in sorted(folder.rglob("result.json")):
        try:
            result = json.loads(path.read_text(encoding="utf-8"))
            if result["accuracy_pct"] is not None and result["split"] == "test":
                results.append(result | {"path": str(path.parent)})
        except (ValueError, KeyError, TypeError) as error:
            broken.append(f"{path} is no result ({type(error).__name__}: {error}): remove its folder and run it again")
    return results, broken


def harmonic_mean(base: float, new: float) -> float:
    """2bn / (b + n), 0 where one of them is 0."""
    return 2 * base * new / (base + new) if base and new else 0.0


def protocol_of(result: dict) -> str:
    """As the run recorded it; of a run that recorded none, base2new where it is about half of the classes, else ""."""
    said = result.get("config", {}).get("PROTOCOL", "")
    if result["classes"] in ("base", "new"):
        return said if said.startswith("ablation") else "base2new"
    return "" if said in ("base2new", "") or said.startswith("ablation") else said


def backbone_of(result: dict) -> str:
    return result["backbone"] if result["backbone"].startswith(("ViT", "RN")) else Path(result["backbone"]).name


def sort_results(results: list[dict]) -> dict[tuple, Seeds]:
    """(protocol, backbone, shots, trainer, data set, classes) -> seed -> result.

    Two results for one cell are an error that names both folders.
    """
    cells: dict[tuple, Seeds] = defaultdict(dict)
    for result in results:
        key = (protocol_of(result), backbone_of(result), result["shots"], result["trainer"], result["dataset"],
               result["classes"])  # fmt: skip
        if result["seed"] in cells[key]:
            first, second = cells[key][result["seed"]]["path"], result["path"]
            raise ValueError(f"two results for {key}, seed {result['seed']}: {first} and {second}; give a folder that "
                             "holds one of them")
        cells[key][result["seed"]] = result
    return cells


def family_of(dataset: str) -> str:
    """Which source a transfer data set belongs to: "ImageNet", "Shapes", or "" for one of the user's own."""
    if dataset in ELEVEN or dataset in DOMAINS[:4]:
        return "ImageNet"
    return "Shapes" if dataset.startswith("Shapes") else ""


def rank(names: tuple[str, ...], name: str) -> tuple[int, str]:
    return (names.index(name) if name in names else len(names), name)


def values(seeds: Seeds) -> list[float]:
    """Accuracies in percent, by seed."""
    return [seeds[seed]["accuracy_pct"] for seed in sorted(seeds)]


def spread(numbers: list[float]) -> str:
    """Mean, and the sample standard deviation from two values on."""
    text = f"{statistics.mean(numbers):.2f}"
    return text if len(numbers) < 2 else f"{text} ± {statistics.stdev(numbers):.2f}"
