"""The procedural picture world that `tiny` was trained on and that the `shapes` data sets are drawn from.

A scene is one entity (a geometric shape or a drawn object) with a color, a texture, a size and a location on a plain
ground. The same scene can be drawn in other styles (palette shift, outline, clutter, occlusion, noise): `TRAIN_STYLE`
is what `tiny` saw, the style in `datasets/shapes_benchmark.py` is what it did not see. All of it is ours; nothing is
downloaded.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from PIL import Image, ImageDraw

# RGB in [0, 1]. Eleven colors: the basic color terms of English without gray, which the grounds use, plus cyan.
COLORS: dict[str, tuple[float, float, float]] = {
    "red": (0.88, 0.10, 0.12), "orange": (1.00, 0.55, 0.05), "yellow": (0.98, 0.90, 0.10), "green": (0.12, 0.62, 0.20),
    "cyan": (0.15, 0.82, 0.88), "blue": (0.10, 0.22, 0.85), "purple": (0.52, 0.15, 0.68), "pink": (1.00, 0.52, 0.72),
    "brown": (0.42, 0.24, 0.10), "black": (0.03, 0.03, 0.03), "white": (0.98, 0.98, 0.98),
}
SHAPES = ("circle", "square", "triangle", "pentagon", "hexagon", "star", "cross", "ring", "diamond", "crescent")
OBJECTS = ("house", "tree", "car", "fish", "boat", "cup", "key", "flower", "umbrella", "chair")
ENTITIES = SHAPES + OBJECTS
TEXTURES = ("plain", "striped", "dotted", "checkered", "wavy", "speckled")
LOCATIONS = ("top left", "top", "top right", "left", "center", "right", "bottom left", "bottom", "bottom right")
SIZES = ("small", "large")
ATTRIBUTES: dict[str, tuple[str, ...]] = {
    "color": tuple(COLORS), "entity": ENTITIES, "texture": TEXTURES, "location": LOCATIONS, "size": SIZES,
}
IMAGE_SIZE = 64  # pixels; one patch of `tiny` is 16
_SUPERSAMPLE = 3
_DIAMETER = {"small": (22.0, 26.0), "large": (36.0, 42.0)}  # pixels at 64


@dataclass(frozen=True)
class Scene:
    """What is to be seen: one value for each attribute."""

    color: str
    entity: str
    texture: str
    location: str
    size: str

    @property
    def indices(self) -> tuple[int, int, int, int, int]:
        """Positions of the values in `ATTRIBUTES`, in that order."""
        return tuple(names.index(getattr(self, key)) for key, names in ATTRIBUTES.items())  # type: ignore[return-value]


@dataclass(frozen=True)
class Style:
    """How it is drawn. All shares are in [0, 1]; the defaults are the look that `tiny` was trained on."""

    noise: float = 0.02  # standard deviation of pixel noise
    palette_shift: float = 0.0  # share by which colors are pulled towards a rotated, duller palette
    outline: float = 0.0  # 1: only a rim of the entity is painted
    clutter: int = 0  # number of small grey marks strewn over the ground
    occlusion: float = 0.0  # share of the entity's width that a bar of the ground's color hides
    rotation: float = 8.0  # degrees, both ways
    ground_contrast: float = 0.08  # strength of a soft light gradient on the ground
    tint: tuple[float, float, float] = (1.0, 1.0, 1.0)  # light that falls on the whole picture
    blur: float = 0.0  # radius in pixels


TRAIN_STYLE = Style()


def random_scene(rng: np.random.Generator) -> Scene:
    """Every attribute drawn independently and uniformly (shapes and objects are one attribute, `entity`)."""
    return Scene(**{key: names[int(rng.integers(len(names)))] for key, names in ATTRIBUTES.items()})


def _regular(n: int, phase: float = -90.0, radius: float = 1.0) -> list[tuple[float, float]]:
    angles = np.deg2rad(phase + 360.0 * np.arange(n) / n)
    return [(radius * float(np.cos(a)), radius * float(np.sin(a))) for a in angles]


def _star(points: int, inner: float) -> list[tuple[float, float]]:
    outer, dents = _regular(points), _regular(points, -90.0 + 180.0 / points, inner)
    return [corner for pair in zip(outer, dents, strict=True) for corner in pair]


def _outline(entity: str) -> list[tuple[str, list[tuple[float, float]], int]]:
    """The entity as (primitive, corners in [-1, 1] with y down, 1 paint or 0 erase), painted in order."""
    box = lambda x0, y0, x1, y1: [(x0, y0), (x1, y1)]  # noqa: E731 - a one-word name keeps the table readable
    table: dict[str, list[tuple[str, list[tuple[float, float]], int]]] = {
        "circle": [("ellipse", box(-0.92, -0.92, 0.92, 0.92), 1)],
        "square": [("polygon", [(-0.8, -0.8), (0.8, -0.8), (0.8, 0.8), (-0.8, 0.8)], 1)],
        "triangle": [("polygon", [(0, -0.95), (0.98, 0.8), (-0.98, 0.8)], 1)],
        "pentagon": [("polygon", _regular(5), 1)],
        "hexagon": [("polygon", _regular(6, 0.0), 1)],
        "star": [("polygon", _star(5, 0.42), 1)],
        "cross": [("polygon", [(-0.32, -0.95), (0.32, -0.95), (0.32, 0.95), (-0.32, 0.95)], 1),
                  ("polygon", [(-0.95, -0.32), (0.95, -0.32), (0.95, 0.32), (-0.95, 0.32)], 1)],
        "ring": [("ellipse", box(-0.95, -0.95, 0.95, 0.95), 1), ("ellipse", box(-0.45, -0.45, 0.45, 0.45), 0)],
        "diamond": [("polygon", [(0, -1.0), (0.68, 0), (0, 1.0), (-0.68, 0)], 1)],
        "crescent": [("ellipse", box(-0.95, -0.95, 0.95, 0.95), 1), ("ellipse", box(-0.35, -0.85, 1.35, 0.85), 0)],
        "house": [("polygon", [(-0.7, -0.1), (0.7, -0.1), (0.7, 0.9), (-0.7, 0.9)], 1),
                  ("polygon", [(0, -0.98), (1.0, -0.05), (-1.0, -0.05)], 1),
                  ("polygon", [(-0.18, 0.35), (0.18, 0.35), (0.18, 0.9), (-0.18, 0.9)], 0)],
        "tree": [("polygon", [(-0.16, 0.3), (0.16, 0.3), (0.16, 1.0), (-0.16, 1.0)], 1),
                 ("polygon", [(0, -1.0), (0.55, -0.3), (-0.55, -0.3)], 1),
                 ("polygon", [(0, -0.6), (0.8, 0.45), (-0.8, 0.45)], 1)],
        "car": [("polygon", [(-1.0, 0.0), (1.0, 0.0), (1.0, 0.5), (-1.0, 0.5)], 1),
                ("polygon", [(-0.55, -0.5), (0.4, -0.5), (0.7, 0.0), (-0.75, 0.0)], 1),
                ("ellipse", box(-0.8, 0.25, -0.25, 0.8), 1), ("ellipse", box(0.25, 0.25, 0.8, 0.8), 1),
                ("ellipse", box(-0.62, 0.42, -0.42, 0.62), 0), ("ellipse", box(0.42, 0.42, 0.62, 0.62), 0)],
        "fish": [("ellipse", box(-0.95, -0.5, 0.5, 0.5), 1), ("polygon", [(0.25, 0), (1.0, -0.6), (1.0, 0.6)], 1),
                 ("ellipse", box(-0.68, -0.24, -0.48, -0.04), 0)],
        "boat": [("polygon", [(-1.0, 0.35), (1.0, 0.35), (0.6, 0.85), (-0.6, 0.85)], 1),
                 ("polygon", [(-0.06, -1.0), (0.06, -1.0), (0.06, 0.35), (-0.06, 0.35)], 1),
                 ("polygon", [(0.12, -0.95), (0.85, 0.2), (0.12, 0.2)], 1)],
        "cup": [("polygon", [(-0.75, -0.75), (0.45, -0.75), (0.3, 0.85), (-0.6, 0.85)], 1),
                ("ellipse", box(0.15, -0.5, 0.98, 0.4), 1), ("ellipse", box(0.38, -0.28, 0.76, 0.18), 0),
                ("polygon", [(0.0, -0.7), (0.44, -0.7), (0.34, 0.4), (0.0, 0.4)], 1)],
        "key": [("ellipse", box(-1.0, -0.45, -0.1, 0.45), 1), ("ellipse", box(-0.74, -0.19, -0.36, 0.19), 0),
                ("polygon", [(-0.15, -0.14), (1.0, -0.14), (1.0, 0.14), (-0.15, 0.14)], 1),
                ("polygon", [(0.75, 0.1), (1.0, 0.1), (1.0, 0.55), (0.75, 0.55)], 1),
                ("polygon", [(0.35, 0.1), (0.55, 0.1), (0.55, 0.45), (0.35, 0.45)], 1)],
        "flower": [("ellipse", box(x - 0.4, y - 0.4, x + 0.4, y + 0.4), 1) for x, y in _regular(6, radius=0.58)]
                  + [("ellipse", box(-0.2, -0.2, 0.2, 0.2), 0)],
        "umbrella": [("pieslice", box(-1.0, -0.9, 1.0, 1.0), 1),
                     ("polygon", [(-0.07, 0.0), (0.07, 0.0), (0.07, 0.85), (-0.07, 0.85)], 1),
                     ("polygon", [(-0.4, 0.72), (0.07, 0.72), (0.07, 0.88), (-0.4, 0.88)], 1)],
        "chair": [("polygon", [(-0.7, -1.0), (-0.42, -1.0), (-0.42, 1.0), (-0.7, 1.0)], 1),
                  ("polygon", [(-0.7, 0.0), (0.7, 0.0), (0.7, 0.28), (-0.7, 0.28)], 1),
                  ("polygon", [(0.42, 0.0), (0.7, 0.0), (0.7, 1.0), (0.42, 1.0)], 1)],
    }
    return table[entity]


def entity_mask(entity: str, diameter: float, degrees: float) -> np.ndarray:
    """Coverage of the entity, float32 [S, S] in [0, 1], S the diameter rounded up to even, plus 2."""
    side = int(np.ceil(diameter / 2.0)) * 2 + 2
    big = side * _SUPERSAMPLE
    canvas = Image.new("L", (big, big), 0)
    draw = ImageDraw.Draw(canvas)
    scale, middle = diameter / 2.0 * _SUPERSAMPLE, big / 2.0
    for kind, corners, paint in _outline(entity):
        points = [(middle + scale * x, middle + scale * y) for x, y in corners]
        if kind == "polygon":
            draw.polygon(points, fill=255 * paint)
        elif kind == "pieslice":
            draw.pieslice([points[0], points[1]], 180, 360, fill=255 * paint)
        else:
            draw.ellipse([points[0], points[1]], fill=255 * paint)
    if degrees:
        canvas = canvas.rotate(degrees, resample=Image.Resampling.BILINEAR)
    return np.asarray(canvas.resize((side, side), Image.Resampling.BOX), dtype=np.float32) / 255.0


def texture_field(texture: str, side: int, rng: np.random.Generator) -> np.ndarray:
    """Share of the second tone at each pixel, float32 [side, side] in [0, 1]; `rng` gives period, phase, direction."""
    y, x = np.mgrid[0:side, 0:side].astype(np.float32)
    period = float(rng.uniform(5.0, 7.0))
    phase_x, phase_y = rng.uniform(0.0, period, 2)
    wave = lambda v: np.clip(0.5 + 2.0 * np.sin(2 * np.pi * v / period), 0.0, 1.0)  # noqa: E731 - soft square wave
    if texture == "plain":
        return np.zeros((side, side), np.float32)
    if texture == "striped":
        angle = np.deg2rad(float(rng.choice([0.0, 45.0, 90.0, 135.0])))
        return wave(np.cos(angle) * x + np.sin(angle) * y + phase_x).astype(np.float32)
    if texture == "dotted":
        dx, dy = (x + phase_x) % period - period / 2, (y + phase_y) % period - period / 2
        return np.clip(period * 0.34 + 0.5 - np.hypot(dx, dy), 0.0, 1.0).astype(np.float32)
    if texture == "checkered":
        period *= 1.5
        a, b = wave(x + phase_x), wave(y + phase_y)
        return (a * (1 - b) + b * (1 - a)).astype(np.float32)
    if texture == "wavy":
        swing = 2.2 * np.sin(2 * np.pi * x / 9.0 + phase_y)
        return wave(y + swing + phase_x).astype(np.float32)
    if texture == "speckled":
        return (rng.random((side, side)) < 0.4).astype(np.float32)
    raise ValueError(f"unknown texture {texture!r}; known: {', '.join(TEXTURES)}")


def _luminance(rgb: np.ndarray) -> float:
    return float(rgb @ np.array([0.299, 0.587, 0.114]))


def _tones(color: str, style: Style) -> tuple[np.ndarray, np.ndarray]:
    """Main and second tone of a color, each [3]; the second is lighter for dark colors and darker for light ones."""
    main = np.array(COLORS[color], np.float32)
    if style.palette_shift:
        rotated = 0.8 * main[[1, 2, 0]] + 0.2 * main  # hues turned by a third of the circle
        duller = 0.5 * rotated + 0.5 * _luminance(main)
        main = (1 - style.palette_shift) * main + style.palette_shift * duller
    second = 0.4 * main + 0.6 if _luminance(main) < 0.6 else 0.45 * main
    return main.astype(np.float32), second.astype(np.float32)


def _ground(tones: tuple[np.ndarray, np.ndarray], size: int, style: Style, rng: np.random.Generator) -> np.ndarray:
    """A greyish ground [size, size, 3]; its luminance is 0.2 off the main tone's and 0.12 off the second's."""
    main, second = (_luminance(tone) for tone in tones)
    level = float(rng.uniform(0.08, 0.95))
    while abs(level - main) < 0.2 or abs(level - second) < 0.12:
        level = float(rng.uniform(0.08, 0.95))
    ground = np.full((size, size, 3), level, np.float32) + rng.uniform(-0.05, 0.05, 3).astype(np.float32)
    y, x = np.mgrid[-1:1:size * 1j, -1:1:size * 1j].astype(np.float32)
    angle = rng.uniform(0, 2 * np.pi)
    return ground + style.ground_contrast * (np.cos(angle) * x + np.sin(angle) * y)[..., None].astype(np.float32)


def _strew_clutter(canvas: np.ndarray, style: Style, rng: np.random.Generator) -> None:
    size = canvas.shape[0]
    for _ in range(style.clutter):
        w, h = (int(v) for v in rng.integers(2, 9, 2))
        left, top = (int(v) for v in rng.integers(0, size - 2, 2))
        canvas[top:top + h, left:left + w] = rng.uniform(0.1, 0.95) + rng.uniform(-0.06, 0.06, 3)


def render(scene: Scene, rng: np.random.Generator, *, style: Style = TRAIN_STYLE, size: int = IMAGE_SIZE) -> np.ndarray:
    """One picture of the scene, uint8 [size, size, 3]. The same generator state gives the same pixels."""
    unit = size / IMAGE_SIZE
    main, second = _tones(scene.color, style)
    canvas = _ground((main, second), size, style, rng)
    _strew_clutter(canvas, style, rng)
    diameter = float(rng.uniform(*_DIAMETER[scene.size])) * unit
    mask = entity_mask(scene.entity, diameter, float(rng.uniform(-style.rotation, style.rotation)))
    side = mask.shape[0]
    field = texture_field(scene.texture, side, rng)[..., None]
    paint = (1 - field) * main + field * second
    if style.outline:
        inner = np.minimum.reduce([np.roll(mask, shift, axis) for shift in (-2, 2) for axis in (0, 1)])
        mask = mask - style.outline * inner * mask
    if style.occlusion:
        width = max(1, int(style.occlusion * diameter))
        start = int(rng.integers(0, max(1, side - width)))
        mask = mask.copy()
        if rng.random() < 0.5:
            mask[:, start:start + width] = 0.0
        else:
            mask[start:start + width] = 0.0
    row, column = divmod(LOCATIONS.index(scene.location), 3)
    jitter = rng.uniform(-2.0, 2.0, 2) * unit
    top = int(round((16 + 16 * row) * unit + jitter[0] - side / 2))
    left = int(round((16 + 16 * column) * unit + jitter[1] - side / 2))
    t0, l0, t1, l1 = max(0, top), max(0, left), min(size, top + side), min(size, left + side)
    part = np.s_[t0 - top:t1 - top, l0 - left:l1 - left]
    cover = mask[part][..., None]
    canvas[t0:t1, l0:l1] = (1 - cover) * canvas[t0:t1, l0:l1] + cover * paint[part]
    canvas = canvas * np.array(style.tint, np.float32)
    if style.noise:
        canvas = canvas + style.noise * rng.standard_normal(canvas.shape).astype(np.float32)
    pixels = (np.clip(canvas, 0.0, 1.0) * 255.0 + 0.5).astype(np.uint8)
    if style.blur:
        from PIL import ImageFilter

        pixels = np.asarray(Image.fromarray(pixels).filter(ImageFilter.GaussianBlur(style.blur)))
    return pixels
