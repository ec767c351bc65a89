"""A small world of sentences with a toy encoder, so that the concept tests need no Sentence-BERT."""

import hashlib

import numpy as np

from dear_plugin.analysis.descriptions import Family

WORDS = {
    "color": ("red", "green", "blue", "pink", "black", "white"),
    "shape": ("circle", "square", "star", "cross", "ring", "heart"),
    "texture": ("striped", "dotted", "wavy", "plain", "rough", "smooth"),
    "emotion": ("happy", "sad", "angry", "calm", "proud", "bored"),
}
TEMPLATES = ("{} one", "{} two")
FAMILIES = {n: Family(None if n == "emotion" else n, TEMPLATES, words) for n, words in WORDS.items()}


def sentences() -> list[str]:
    return sorted(s for family in FAMILIES.values() for s in family.sentences())


def family_of(sentence: str) -> str:
    return next(n for n, words in WORDS.items() if sentence.split()[0] in words)


def encode(texts: list[str]) -> np.ndarray:
    """The family's axis plus a little that is fixed by the text: clusters are the families."""
    rows = []
    for text in texts:
        seed = int.from_bytes(hashlib.sha256(text.encode()).digest()[:4], "little")
        noise = np.random.default_rng(seed).standard_normal(12)
        rows.append(np.eye(12)[list(WORDS).index(family_of(text))] + 0.05 * noise)
    return np.array(rows, dtype=np.float32)
