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
        same_as, others, pretrained = (values.pop(key, None) for key in ("same_as", "also", "pretrained"))
        origin = by_name[same_as] if same_as else Entry({}, 0.0, False, False, "", None)
        source, date = values.pop("source", origin.source), values.pop("date", origin.date)
        parameters = values.pop("parameters") * 1e9 if "parameters" in values else origin.parameters
        config = {**origin.config, **values}
        config = {key: value for key, value in config.items() if value is not None or key == "sliding_window"}  # null: none
        for other in (name, *(others or ())):
            is_first = other == name and not same_as
            by_name[other] = Entry(config, parameters, is_first, bool(pretrained), source, date)
    return by_name
