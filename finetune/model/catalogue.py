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
    #: Published number, of the language model alone.
    parameters: float
    #: Whether no earlier entry has the same values.
    first: bool
    #: Whether the family has no chat model of this size.
    pretrained: bool
    #: Keys in `sources()`, separated by ", ".
    source: str
    #: When the values were read; None for rows older than this field.
    date: str | None


def catalogue() -> dict[str, dict[str, Any]]:
    """Return the planning fields of config.json by hub id."""
    return {name: entry.config for name, entry in entries().items()}


def sources() -> dict[str, str]:
    """Return each source's commit or version."""
    return dict(_file_content()["sources"])


@cache
def _file_content() -> dict[str, Any]:
    return dict(json.loads(_FILE.read_text(encoding="utf-8")))


@cache
def entries() -> dict[str, Entry]:
    """Return every entry by hub id."""
    rows = _file_content()["models"]
    by_name: dict[str, Entry] = {}
    for name, row in rows.items():
        values = dict(row)
        same_as, also, pretrained = (values.pop(key, None) for key in ("same_as", "also", "pretrained"))
        origin = by_name[same_as] if same_as else Entry({}, 0.0, False, False, "", None)
        source, date = values.pop("source", origin.source), values.pop("date", origin.date)
        parameters = values.pop("parameters") * 1e9 if "parameters" in values else origin.parameters
        config = {**origin.config, **values}
        # null removes a value of `same_as`; a sliding_window of null means full attention
        config = {key: value for key, value in config.items() if value is not None or key == "sliding_window"}
        for hub_id in (name, *(also or ())):
            is_first = hub_id == name and not same_as
            by_name[hub_id] = Entry(config, parameters, is_first, bool(pretrained), source, date)
    return by_name
