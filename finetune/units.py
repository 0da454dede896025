"""Format bytes, seconds, counts and untrusted text for readers."""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Callable

KIB, MIB, GIB = 2**10, 2**20, 2**30
_FACTORS = {
    "": 1, "b": 1, "kb": 10**3, "mb": 10**6, "gb": 10**9, "tb": 10**12, "kib": KIB, "mib": MIB, "gib": GIB, "tib": 2**40,
}  # fmt: skip


def format_bytes(count: int | float | None) -> str:
    """Return `9.8 GiB`, `512 MiB` or `not measured`."""
    if count is None:
        return "not measured"
    sign, size = ("-" if count < 0 else ""), abs(count)
    for unit, factor, digits in (("GiB", GIB, 2 if size < 10 * GIB else 1), ("MiB", MIB, 0), ("KiB", KIB, 0)):
        if size >= factor:
            return f"{sign}{size / factor:.{digits}f} {unit}"
    return f"{sign}{size:.0f} B"


def gib(size: float) -> str:
    """Return `22.7 GiB`, or MiB below 0.1 GiB."""
    return f"{size / GIB:,.1f} GiB" if abs(size) >= 0.0995 * GIB else f"{size / MIB:,.0f} MiB"  # 102 MiB would be 0.1 GiB


def parse_bytes(text: str) -> int:
    """Parse `22.1GiB`, `24 GB` or `1024`. Raises ValueError."""
    match = re.fullmatch(r"\s*([0-9]+(?:\.[0-9]+)?)\s*([A-Za-z]*)\s*", text)
    if not match or match[2].lower() not in _FACTORS:
        raise ValueError(f"'{text}' is not a size; write for example 22.1GiB")
    return round(float(match[1]) * _FACTORS[match[2].lower()])


def format_seconds(seconds: float | None) -> str:
    """Return `42 s`, `3 min 05 s` or `2 h 10 min`."""
    if seconds is None:
        return "unknown"
    total_s = round(seconds)
    if total_s < 60:
        return f"{total_s} s"
    if total_s < 3600:
        return f"{total_s // 60} min {total_s % 60:02d} s"
    return f"{total_s // 3600} h {total_s % 3600 // 60:02d} min"


def format_count(count: int | float | None) -> str:
    """Return `1,234`, `12.3k`, `4.5M` or `8.0B`."""
    if count is None:
        return "unknown"
    for unit, minimum, factor in (("B", 1e9, 1e9), ("M", 1e6, 1e6), ("k", 1e4, 1e3)):  # four digits need no k
        if abs(count) >= minimum:
            return f"{count / factor:.1f}{unit}"
    return f"{count:,.0f}" if float(count).is_integer() else f"{count:,.1f}"


def format_measured(value: float | None, form: str = ".4f") -> str:
    """Return a value in the format `form`, or `not measured`."""
    return "not measured" if value is None else format(value, form)


#: Callback that shows what a long task is doing.
Progress = Callable[[str], None]


def printable(text: str) -> str:
    """Escape control and bidirectional characters."""
    if text.isprintable():
        return text
    return "".join(
        character
        if character in "\n\t" or character.isprintable() or unicodedata.category(character) == "Zs"
        else character.encode("unicode_escape").decode()
        for character in text
    )
