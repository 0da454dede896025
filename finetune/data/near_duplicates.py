"""Near-duplicate rows: MinHash sketches of their texts, compared in bands (Broder 1997)."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from finetune.data.example import Example

#: Values of a sketch, how many of them form a band, and how many must agree: 10 of 12 estimate a similarity of 0.83.
HASHES, _BAND, _MIN_EQUAL = 12, 3, 10
#: Bytes of a shingle; fewest shingles of a text that has a sketch. One shingle of four is used.
_SHINGLE, _MIN_SHINGLES = 12, 20
#: Characters of a text that are hashed, and bytes of the texts that are hashed at once.
_MAX_CHARACTERS, _BATCH_BYTES = 20_000, 2**20
#: Rows that are compared.
MAX_ROWS = 200_000
_PRIME, _MULTIPLIER = np.uint64(0x100000001B3), np.uint64(0x9E3779B97F4A7C15)
_HASH_PARAMETERS = np.random.default_rng(17).integers(1, 2**63, (2, HASHES), dtype=np.uint64)
_HASH_FACTORS, _HASH_OFFSETS = _HASH_PARAMETERS[0] | np.uint64(1), _HASH_PARAMETERS[1]


def sketches(examples: Iterable[Example]) -> np.ndarray:
    """A sketch of each row's text, as (rows, HASHES) uint32; zeros for short texts. System prompts are left out."""
    batches = [np.zeros((0, HASHES), np.uint32), *(_sketch_batch(texts) for texts in _batches(examples))]
    return np.concatenate(batches)


def _batches(examples: Iterable[Example]) -> Iterator[list[bytes]]:
    texts: list[bytes] = []
    total_bytes = 0
    for example in examples:
        texts.append("\n".join(example.texts_without_system())[:_MAX_CHARACTERS].lower().encode("utf-8", "replace"))
        total_bytes += len(texts[-1])
        if total_bytes > _BATCH_BYTES:
            yield texts
            texts, total_bytes = [], 0
    if texts:
        yield texts


def _sketch_batch(texts: list[bytes]) -> np.ndarray:
    sketch = np.zeros((len(texts), HASHES), np.uint32)
    row_of_byte = np.repeat(np.arange(len(texts)), list(map(len, texts)))
    shingle_count = len(row_of_byte) - _SHINGLE + 1
    if shingle_count <= 0:
        return sketch
    text_bytes = np.frombuffer(b"".join(texts), np.uint8)
    hashes = np.zeros(shingle_count, np.uint64)
    for offset in range(_SHINGLE):
        hashes = hashes * _PRIME + text_bytes[offset : offset + shingle_count]
    hashes = (hashes ^ (hashes >> np.uint64(29))) * _MULTIPLIER
    is_used = (row_of_byte[:shingle_count] == row_of_byte[_SHINGLE - 1 :]) & (hashes >> np.uint64(62) == 0)
    hashes, row_of_byte = hashes[is_used], row_of_byte[:shingle_count][is_used]
    rows, starts, counts = np.unique(row_of_byte, return_index=True, return_counts=True)
    for hash_index in range(HASHES if len(rows) else 0):
        permuted = ((hashes * _HASH_FACTORS[hash_index] + _HASH_OFFSETS[hash_index]) >> np.uint64(32)).astype(np.uint32)
        sketch[rows, hash_index] = np.minimum.reduceat(permuted, starts)
    sketch[rows[counts < _MIN_SHINGLES]] = 0
    return sketch


def near_duplicates(sketch: np.ndarray, content: np.ndarray) -> np.ndarray:
    """Mask of the rows that are similar to an earlier one of another `content`; rows without a sketch are similar to none."""
    has_sketch = sketch.any(axis=1)
    is_duplicate = np.zeros(len(sketch), dtype=bool)
    for start in range(0, HASHES, _BAND):
        band = sketch[:, start : start + _BAND].astype(np.uint64)
        keys = (band[:, 0] * _PRIME ^ band[:, 1]) * _MULTIPLIER ^ band[:, 2]
        _, first_rows, inverse = np.unique(keys, return_index=True, return_inverse=True)
        earlier = first_rows[inverse]
        is_similar = (sketch == sketch[earlier]).sum(axis=1) >= _MIN_EQUAL
        is_duplicate |= has_sketch & is_similar & (content != content[earlier]).any(axis=1)
    return is_duplicate
