"""A checksum as the last key of a JSON object's text: a changed byte of a file or line is noticed."""

from __future__ import annotations

import zlib

#: The end of a JSON object with a checksum is this, eight digits, a quote and a brace.
_KEY = b', "checksum": "'
_BYTES = len(_KEY) + 10


def with_checksum(text: str) -> str:
    """The text of a JSON object that has keys, with the CRC-32 of what stands before it as its last key."""
    body = text.rstrip()[:-1].rstrip()
    return f'{body}{_KEY.decode()}{zlib.crc32(body.encode()):08x}"}}'


def has_checksum(text: bytes) -> bool:
    """Whether the text of a JSON object ends with one."""
    return text[-_BYTES:-10] == _KEY


def is_damaged(text: bytes) -> bool:
    """Whether the text of a JSON object differs from its checksum; False without a checksum."""
    return has_checksum(text) and b"%08x" % zlib.crc32(text[:-_BYTES]) != text[-10:-2]
