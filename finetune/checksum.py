"""Checksum as the last key of a JSON object."""

from __future__ import annotations

import zlib

_PREFIX = b', "checksum": "'  # followed by eight hexadecimal digits, a quote and a brace
_SUFFIX_BYTES = len(_PREFIX) + 10


def with_checksum(text: str) -> str:
    """Add the CRC-32 of a non-empty JSON object as its last key."""
    body = text.rstrip()[:-1].rstrip()  # without the closing brace
    return f'{body}{_PREFIX.decode()}{zlib.crc32(body.encode()):08x}"}}'


def has_checksum(text: bytes) -> bool:
    """Return whether a JSON object ends with a checksum."""
    return text[-_SUFFIX_BYTES:-10] == _PREFIX


def is_damaged(text: bytes) -> bool:
    """Return whether a checksum exists and is wrong."""
    return has_checksum(text) and b"%08x" % zlib.crc32(text[:-_SUFFIX_BYTES]) != text[-10:-2]
