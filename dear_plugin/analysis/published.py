"""Role maps from published one-word labels of heads, by a table that a reader can see and change.

Such a map (method `published-labels`) is no entropy map: somebody read a head's sentences and wrote one word. A word
that names a core attribute, or a kind of thing one of them covers, makes an attribute head; another specific word a
specialist of "other"; a word without a subject ("Description") a generalization head. One word cannot say "mixed".
"""

from collections.abc import Mapping, Sequence
from typing import Any

from dear_plugin.analysis.concepts import OTHER
from dear_plugin.roles import HeadInfo, HeadRole, RoleMap

METHOD = "published-labels"

# Role words of the table below that are no core attribute.
GENERAL = "generalization"

# Label (lower case, final s dropped) -> core attribute, "other" (a specialist), or "generalization". All ours.
RULES: dict[str, str] = {
    **dict.fromkeys(("color", "colorful", "colorpalette", "monochrome"), "color"),
    **dict.fromkeys(("shape",), "shape"),
    **dict.fromkeys(("texture", "pattern", "material", "textile", "design"), "texture"),
    **dict.fromkeys((
        "object", "item", "animal", "bird", "pet", "wildlife", "marine", "vehicle", "transportation", "device",
        "timepiece", "jewelry", "clothing", "apparel", "fashion", "flower", "mechanism"), "object"),
    **dict.fromkeys((
        "location", "geographic location", "geo-location", "region", "city", "urban", "landscape", "scenery", "setting",
        "environment", "waterbody", "structure", "architecture"), "location"),
    **dict.fromkeys((
        "anatomy", "body part", "bodypart", "facial expression", "expression", "emotion", "gesture", "age", "people",
        "sibling", "pair", "relationship", "interaction", "occupation", "profession", "performer",
        "royalty", "activity", "activitie", "movement", "event",
        "festival", "emergency", "culture", "communication", "writing", "typography",
        "letter", "word starting with the letter z", "number", "counting", "music", "sound",
        "technology", "craftsmanship", "futuristic", "fictional", "astronomy", "earth",
        "nature", "weather", "wind", "season", "seasonal", "time",
        "night-scene", "light", "reflection", "atmosphere", "ephemeral", "art", "artwork", "artistic", "medium",
        "photography", "perspective", "composition", "technique", "effect", "overlay"), OTHER),
    **dict.fromkeys((
        "description", "descriptive", "descriptive style", "descriptor", "subject", "concept", "category", "style",
        "aesthetic", "quality", "fragment", "visual", "observation"), GENERAL),
}


def rule_of(label: str) -> str:
    """The table's word for a label; an unknown label is refused."""
    key = label.strip().lower()
    key = key if key in RULES else key.removesuffix("s")
    if key not in RULES:
        raise ValueError(f"label {label!r} is not in the table of dear_plugin/analysis/published.py: add it there.")
    return RULES[key]


def published_role_map(labels: Mapping[int, Sequence[str]], *, parameters: Mapping[str, Any]) -> RoleMap:
    """A role map from layer (from 0) -> label per head. `parameters` must name their model ("intended")."""
    if "intended" not in parameters:
        raise ValueError('parameters need "intended": the geometry of the model that the labels belong to.')
    infos = {}
    for layer, row in labels.items():
        for head, label in enumerate(row):
            word = rule_of(label)
            evidence = {"label": label}
            if word == GENERAL:
                infos[layer, head] = HeadInfo(HeadRole.GENERALIZATION, None, None, evidence)
            else:
                infos[layer, head] = HeadInfo(HeadRole.ATTRIBUTE, word, None, evidence)
    return RoleMap.from_heads(infos, method=METHOD, parameters=parameters)
