"""Rows that say nearly the same: MinHash sketches of their texts, compared in bands (Broder 1997)."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from finetune.data.formats import Example

#: Values of a sketch, how many of them form a band, and how many must agree: 10 of 12 estimate a similarity of 0.83.
HASHES, _BAND, _AGREE = 12, 3, 10
#: Bytes of a shingle. One of four is used, and a text with fewer than so many has no sketch.
_SHINGLE, _LEAST = 12, 20
#: Characters of a text that are looked at, and bytes of the texts that are hashed at once.
_MOST_CHARACTERS, _AT_ONCE = 20_000, 2**20
#: Rows that are compared.
MOST_ROWS = 200_000
_PRIME, _MIX = np.uint64(0x100000001B3), np.uint64(0x9E3779B97F4A7C15)
_RANDOM = np.random.default_rng(17).integers(1, 2**63, (2, HASHES), dtype=np.uint64)
_FACTORS, _SHIFTS = _RANDOM[0] | np.uint64(1), _RANDOM[1]


def sketches(examples: Iterable[Example]) -> np.ndarray:
    """A sketch of each row's text, as (rows, HASHES) uint32; zeros for short texts. System prompts are left out."""
    parts = [np.zeros((0, HASHES), np.uint32), *(_sketched(texts) for texts in _batches(examples))]
    return np.concatenate(parts)


def _batches(examples: Iterable[Example]) -> Iterator[list[bytes]]:
    texts: list[bytes] = []
    size = 0
    for example in examples:
        texts.append("\n".join(example.said())[:_MOST_CHARACTERS].lower().encode("utf-8", "replace"))
        size += len(texts[-1])
        if size > _AT_ONCE:
            yield texts
            texts, size = [], 0
    if texts:
        yield texts


def _sketched(texts: list[bytes]) -> np.ndarray:
    made = np.zeros((len(texts), HASHES), np.uint32)
    owner = np.repeat(np.arange(len(texts)), list(map(len, texts)))
    count = len(owner) - _SHINGLE + 1
    if count <= 0:
        return made
    data = np.frombuffer(b"".join(texts), np.uint8)
    hashed = np.zeros(count, np.uint64)
    for place in range(_SHINGLE):
        hashed = hashed * _PRIME + data[place : place + count]
    hashed = (hashed ^ (hashed >> np.uint64(29))) * _MIX
    used = (owner[:count] == owner[_SHINGLE - 1 :]) & (hashed >> np.uint64(62) == 0)
    hashed, owner = hashed[used], owner[:count][used]
    rows, starts, counts = np.unique(owner, return_index=True, return_counts=True)
    for number in range(HASHES if len(rows) else 0):
        values = ((hashed * _FACTORS[number] + _SHIFTS[number]) >> np.uint64(32)).astype(np.uint32)
        made[rows, number] = np.minimum.reduceat(values, starts)
    made[rows[counts < _LEAST]] = 0
    return made


def near(sketch: np.ndarray, content: np.ndarray) -> np.ndarray:
    """Which rows are much like an earlier one of another `content`, as a mask; rows without a sketch are like none."""
    has = sketch.any(axis=1)
    found = np.zeros(len(sketch), dtype=bool)
    for start in range(0, HASHES, _BAND):
        band = sketch[:, start : start + _BAND].astype(np.uint64)
        keys = (band[:, 0] * _PRIME ^ band[:, 1]) * _MIX ^ band[:, 2]
        _, first, inverse = np.unique(keys, return_index=True, return_inverse=True)
        earlier = first[inverse]
        alike = (sketch == sketch[earlier]).sum(axis=1) >= _AGREE
        found |= has & alike & (content != content[earlier]).any(axis=1)
    return found
