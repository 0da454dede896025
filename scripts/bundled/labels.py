"""Parcel labels as small images: a coloured shape on coloured paper. numpy only, so the pixels are the same everywhere."""

from __future__ import annotations

import random
from dataclasses import dataclass

import numpy as np

COLOURS = {
    "red": (208, 40, 40), "green": (36, 150, 60), "blue": (40, 80, 210), "yellow": (235, 200, 30), "purple": (140, 50, 170),
    "black": (25, 25, 25),
}  # fmt: skip
SHAPES = ("circle", "square", "triangle", "cross")
#: Sizes of a label in pixels, (width, height).
SIZES = ((48, 32), (64, 32), (48, 48), (64, 48), (32, 48), (32, 64))
PAPERS = {"white": (245, 245, 240), "pink": (250, 190, 210), "cyan": (170, 235, 240), "brown": (190, 150, 110)}


@dataclass(frozen=True)
class Label:
    """The content of a label, its size in pixels, and the seed of its layout."""

    shape: str
    colour: str
    paper: str
    size: tuple[int, int]
    seed: int


def draw_label(rng: random.Random) -> Label:
    """A label; each shape, colour, paper and size is equally likely."""
    return Label(
        rng.choice(SHAPES), rng.choice(list(COLOURS)), rng.choice(list(PAPERS)), rng.choice(SIZES), rng.randrange(2**32)
    )


def draw_labels(rng: random.Random, count: int, excluded: set[Label]) -> list[Label]:
    """Draw `count` labels that are not in `excluded`, and add them there."""
    labels: list[Label] = []
    while len(labels) < count:
        label = draw_label(rng)
        if label not in excluded:
            excluded.add(label)
            labels.append(label)
    return labels


def pixels(label: Label) -> np.ndarray:
    """The picture, (height, width, 3) of uint8."""
    rng = random.Random(label.seed)
    width, height = label.size
    picture = np.full((height, width, 3), PAPERS[label.paper], dtype=np.uint8)
    mask = _shape(label.shape, rng.randint(20, 26))
    x, y = rng.randint(2, width - len(mask) - 2), rng.randint(2, height - len(mask) - 2)
    picture[y : y + len(mask), x : x + len(mask)][mask] = COLOURS[label.colour]
    return picture


def _shape(name: str, size: int) -> np.ndarray:
    y, x = np.mgrid[0:size, 0:size] + 0.5
    centre = size / 2
    if name == "circle":
        return (x - centre) ** 2 + (y - centre) ** 2 <= centre**2
    if name == "triangle":
        return np.abs(x - centre) <= y / 2
    if name == "cross":
        return (np.abs(x - centre) <= size / 7) | (np.abs(y - centre) <= size / 7)
    return np.ones((size, size), dtype=bool)
