"""The sentence around a class name: hand-written by data set, as CoOp's zero-shot trainer has them; see `template_for`.

Here and not beside the readers, because DeAR also runs in codebases that have data sets of their own under these names.
"""

from __future__ import annotations

from typing import Any

DEFAULT_TEMPLATE = "a photo of a {}."
TEMPLATES = {
    "OxfordPets": "a photo of a {}, a type of pet.",
    "OxfordFlowers": "a photo of a {}, a type of flower.",
    "Food101": "a photo of {}, a type of food.",
    "FGVCAircraft": "a photo of a {}, a type of aircraft.",
    "DescribableTextures": "{} texture.",
    "EuroSAT": "a centered satellite photo of {}.",
    "UCF101": "a photo of a person doing {}.",
    "ShapesColor": "a photo of a {} thing.",
    "ShapesTexture": "a photo of a {} thing.",
    "ShapesLocation": "a photo of a thing in the {}.",
}


def template_for(cfg: Any) -> str:
    """The prompt with {} for the class name: DATASET.TEMPLATE, else the data set's own, else the plain sentence.

    ValueError if DATASET.TEMPLATE has no {}.
    """
    template = cfg.DATASET.get("TEMPLATE", "")
    if template and "{}" not in template:
        raise ValueError(f"DATASET.TEMPLATE is {template!r}: it needs {{}} where the class name goes")
    return template or TEMPLATES.get(cfg.DATASET.NAME, DEFAULT_TEMPLATE)
