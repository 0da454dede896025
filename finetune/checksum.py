"""Checksum as the last key of a JSON object."""

from __future__ import annotations

import zlib

_KEY = b', "checksum": "'  # followed by eight hexadecimal digits, a quote and a brace
_BYTES = len(_KEY) + 10


def with_checksum(text: str) -> str:
    """Append the CRC-32 of a JSON object with keys."""
    body = text.rstrip()[:-1].rstrip()
    return f'{body}{_KEY.decode()}{zlib.crc32(body.encode()):08x}"}}'


def has_checksum(text: bytes) -> bool:
    """Return whether there is a checksum."""
    return text[-_BYTES:-10] == _KEY


def is_damaged(text: bytes) -> bool:
    """Return whether the checksum is wrong."""
    return has_checksum(text) and b"%08x" % zlib.crc32(text[:-_BYTES]) != text[-10:-2]
