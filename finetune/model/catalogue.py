"""The packaged catalogue of models."""

from __future__ import annotations

import json
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

_FILE = Path(__file__).resolve().parent / "configurations.json"


@dataclass(frozen=True)
class Entry:
    """A model of the catalogue."""

    config: dict[str, Any]
    #: As published, for the language model alone.
    parameters: float
    #: No earlier entry has the same values.
    first: bool
    #: No chat model of this size exists.
    pretrained: bool
    #: Key in `sources()`.
    source: str
    #: Date of reading the values; None for rows older than this field.
    date: str | None


def catalogue() -> dict[str, dict[str, Any]]:
    """Return the planning fields of config.json by hub id."""
    return {name: entry.config for name, entry in entries().items()}


def sources() -> dict[str, str]:
    """Return each source with its commit or version, by key."""
    return dict(_file()["sources"])


@cache
def _file() -> dict[str, Any]:
    content: dict[str, Any] = json.loads(_FILE.read_text(encoding="utf-8"))
    return content


@cache
def entries() -> dict[str, Entry]:
    """Return every entry by hub id."""
    rows = _file()["models"]
    by_name: dict[str, Entry] = {}
    for name, row in rows.items():
        values = dict(row)
        origin = by_name[values.pop("same_as")] if "same_as" in values else None
        others, source = values.pop("also", []), values.pop("source", origin.source if origin else "")
        billions = values.pop("parameters", None)
        parameters = billions * 1e9 if billions else origin.parameters if origin else 0.0
        pretrained = values.pop("pretrained", False)
        date = values.pop("date", origin.date if origin else None)
        config = {**(origin.config if origin else {}), **values}
        config = {key: value for key, value in config.items() if value is not None or key == "sliding_window"}  # null: none
        for index, other in enumerate([name, *others]):
            by_name[other] = Entry(config, parameters, origin is None and index == 0, pretrained, source, date)
    return by_name
