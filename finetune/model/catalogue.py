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


def catalogue() -> dict[str, dict[str, Any]]:
    """Return the planning fields of config.json by hub id."""
    return {name: entry.config for name, entry in entries().items()}


@cache
def entries() -> dict[str, Entry]:
    """Return every entry by hub id."""
    by_name: dict[str, Entry] = {}
    for name, values in json.loads(_FILE.read_text(encoding="utf-8"))["models"].items():
        of_row = ("same_as", "also", "pretrained", "source", "date")  # the other keys are of config.json
        same_as, also, pretrained, *_ = [values.pop(key, None) for key in of_row]
        origin = by_name[same_as] if same_as else Entry({}, 0.0, False, False)
        parameters = values.pop("parameters") * 1e9 if "parameters" in values else origin.parameters
        config = {**origin.config, **values}
        # null removes a value of `same_as`; a sliding_window of null means full attention
        config = {key: value for key, value in config.items() if value is not None or key == "sliding_window"}
        for hub_id in (name, *(also or ())):
            is_first = hub_id == name and not same_as
            by_name[hub_id] = Entry(config, parameters, is_first, bool(pretrained))
    return by_name
