"""From a card's name as people type it to its name in the catalogue: `4090`, `RTX 4090 24GB`, `3060ti`."""

from __future__ import annotations

import difflib
import re
from collections.abc import Mapping

_SIZE = re.compile(r"(\d+)\s*g(?:i?b)?")
_MAKERS = re.compile(r"nvidia|geforce|tesla|quadro|graphics|corporation|generation")
_SPELT = (("mobile", "laptop"), ("max-q", "laptop"), ("notebook", "laptop"), ("tis", "tisuper"))


_COUNT = re.compile(r"^(\d{1,2}) ?[x*] ?(?=\D|\d{4})|(?<=[a-z0-9]) ?[x*] ?(\d{1,2})$", re.I)


def split_count(typed: str) -> tuple[int, str]:
    """`2x3090`, `8 x H100` or `3090 x2` as the number of cards and the card; 1 for a name without a number."""
    count = _COUNT.search(typed.strip())
    name = _COUNT.sub("", typed.strip()).strip() if count else typed
    return (int(count[1] or count[2]), name) if count and name else (1, typed)


def catalogue_name(typed: str, sizes: Mapping[str, int], devices: Mapping[str, str]) -> str | None:
    """The one card that `typed` names, ignoring case, spaces, dashes and maker.

    `sizes`: name -> GB on the box; `devices`: name -> the driver's own name, which is one, too, where only one card has it.
    """
    names = {_short(name): name for name in sizes}
    if exact := names.get(_short(typed)):
        return exact
    driver_names = [name for name, device in devices.items() if plain(device) == plain(typed)]
    if len(driver_names) == 1:
        return driver_names[0]
    size = _SIZE.search(typed.lower())
    without_size = names.get(_short(_SIZE.sub("", typed.lower()))) if size else None
    return without_size if without_size and size and sizes[without_size] == int(size[1]) else None


def close_names(typed: str, sizes: Mapping[str, int], most: int = 4) -> list[str]:
    """Cards that may be meant: those with the memory, of which `typed` is the beginning, or with a name like it."""
    size = _SIZE.fullmatch(typed.strip().lower())
    if size:
        return sorted((name for name in sizes if sizes[name] == int(size[1])), key=_rtx_first)[:most]
    wanted, names = _short(typed), {_short(name): name for name in sizes}
    starting = [name for short, name in names.items() if wanted and short.startswith(wanted)]
    if not starting:  # a suffix that no card has: RTX 5070 Ti Ultra
        beginnings = [short for short in names if len(short) >= 4 and short[:4].isdecimal() and wanted.startswith(short)]
        starting = [names[max(beginnings, key=len)]] if beginnings else []
    return (starting or [names[short] for short in difflib.get_close_matches(wanted, names, n=3, cutoff=0.55)])[:most]


def _rtx_first(name: str) -> tuple[bool, str]:
    return (not name.startswith("rtx-"), name)


def plain(name: str) -> str:
    """A name without maker, spaces and dashes."""
    return re.sub(r"[^a-z0-9]", "", _MAKERS.sub("", name.lower()))


def _short(name: str) -> str:
    text = re.sub(r"(\d\d)s$", r"\1super", plain(name))
    for spelling, standard in _SPELT:
        text = re.sub(rf"{spelling.replace('-', '')}$", standard, text)
    return re.sub(r"^(rtx|gtx)", "", text)
