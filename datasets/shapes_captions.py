"""Sentences about a scene: many templates over random subsets of its attributes, with the attributes each one names."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from datasets.shapes import ATTRIBUTES, OBJECTS, Scene

# Other words for the same value; the first is the value itself and is drawn most often.
SYNONYMS: dict[str, tuple[str, ...]] = {
    "plain": ("plain", "solid"), "dotted": ("dotted", "spotted"), "checkered": ("checkered", "checked"),
    "small": ("small", "little", "tiny"), "large": ("large", "big", "huge"),
    "top left": ("top left", "upper left"), "top right": ("top right", "upper right"),
    "bottom left": ("bottom left", "lower left"), "bottom right": ("bottom right", "lower right"),
    "center": ("center", "middle"),
}
_OPENINGS = ("a photo of ", "a picture of ", "an image of ", "a drawing of ", "this is ", "there is ", "I see ", "")
_CORNERS = ("top left", "top right", "bottom left", "bottom right")


@dataclass(frozen=True)
class Caption:
    """A sentence and, in the order of `ATTRIBUTES`, the index of each value that it names (-1: not named)."""

    text: str
    named: tuple[int, ...]


def _word(value: str, rng: np.random.Generator) -> str:
    options = SYNONYMS.get(value, (value,))
    return options[0] if rng.random() < 0.6 else options[int(rng.integers(len(options)))]


def _article(phrase: str) -> str:
    return ("an " if phrase[0] in "aeiou" else "a ") + phrase


def _place(location: str, rng: np.random.Generator) -> str:
    word = _word(location, rng)
    if location in _CORNERS and rng.random() < 0.5:
        word += " corner"
    elif location in ("left", "right") and rng.random() < 0.5:
        word += " side"
    return str(rng.choice(["in the ", "at the ", "on the "])) + word


def _noun(scene: Scene, named: set[str], rng: np.random.Generator) -> str:
    if "entity" not in named:
        return str(rng.choice(["thing", "object", "shape", "figure"]))
    if scene.entity in OBJECTS:
        return scene.entity
    return scene.entity + str(rng.choice(["", "", " shape"]))


def _full_sentence(scene: Scene, named: set[str], rng: np.random.Generator) -> str:
    adjectives = [_word(getattr(scene, key), rng) for key in ("size", "texture", "color") if key in named]
    if len(adjectives) == 3 and rng.random() < 0.3:
        adjectives[1], adjectives[2] = adjectives[2], adjectives[1]
    phrase = _article(" ".join([*adjectives, _noun(scene, named, rng)]))
    if "location" in named:
        phrase += " " + _place(scene.location, rng) + str(rng.choice(["", " of the picture", " of the image"]))
    return str(rng.choice(_OPENINGS)) + phrase


def _single(scene: Scene, key: str, rng: np.random.Generator) -> str:
    """A short sentence about one attribute alone."""
    word = _word(getattr(scene, key), rng)
    options = {
        "color": (f"the color {word}", f"something {word}", word, f"{word} color", f"it is {word}"),
        "entity": (word, f"the {word}", f"the shape of {_article(word)}", f"it is {_article(word)}", f"one {word}"),
        "texture": (f"{word} texture", f"a {word} pattern", f"something {word}", word, f"it is {word}"),
        "location": (f"it is {_place(scene.location, rng)}", f"something {_place(scene.location, rng)}",
                     _place(scene.location, rng)),
        "size": (f"something {word}", f"it is {word}", word, f"{_article(word)} thing"),
    }[key]
    return options[int(rng.integers(len(options)))]


def caption(scene: Scene, rng: np.random.Generator) -> Caption:
    """One sentence that is true of the scene; a third name one attribute, the rest two to five of them."""
    keys = list(ATTRIBUTES)
    count = int(rng.choice([1, 2, 3, 4, 5], p=[0.35, 0.2, 0.2, 0.15, 0.1]))
    named = {keys[i] for i in rng.choice(len(keys), count, replace=False, p=[0.22, 0.26, 0.22, 0.2, 0.1])}
    if count == 1 and rng.random() < 0.5:
        text = _single(scene, next(iter(named)), rng)
    else:
        text = _full_sentence(scene, named, rng)
    text += str(rng.choice(["", "."]))
    indices = tuple(i if key in named else -1 for key, i in zip(keys, scene.indices, strict=True))
    return Caption(text, indices)


def prompt(key: str, value: str) -> str:
    """The plain sentence by which zero-shot accuracy of one attribute is measured."""
    return {
        "color": f"a photo of {_article(value)} thing.", "entity": f"a photo of {_article(value)}.",
        "texture": f"a photo of {_article(value)} thing.", "size": f"a photo of {_article(value)} thing.",
        "location": f"a photo of a thing in the {value}.",
    }[key]
