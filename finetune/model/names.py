"""The packaged catalogue of models, and informal model names resolved to its hub ids."""

from __future__ import annotations

import difflib
import json
import re
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

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


#: Words in the names of copies that are quantised or packed for inference.
_PACKING = re.compile(
    r"(?<![a-z0-9])(?:gguf|awq|gptq|exl[23]|mlx|bnb|nf4|fp[48]|nvfp4|mxfp4|hqq|eetq|aqlm|onnx|quantized|dynamic|imatrix|i1|unsloth"
    r"|w\d+a\d+|i?q\d+(?:_[a-z0-9]+)*|int[48]|[2-8]bits?|[2-8]bpw|bf16|fp16|f16)(?![a-z0-9])"
)
_MAX_SUGGESTIONS = 4


class Match(NamedTuple):
    """A hub id for a typed name, and a note on the difference."""

    name: str
    note: str


# A name is known if it is an id, an id without its account, or in names.json; also as the name of a packed copy (GGUF, AWQ,
# bnb-4bit). Case does not count. Never another model.
def resolve(typed: str) -> Match | None:
    """Return the catalogue's id for `typed`, or None."""
    account, _, name = _without_address(typed).rpartition("/")
    hub_id = _ids_by_name().get(name) or _ids_by_name().get(_PACKING.sub("", name).strip("-_:. "))
    if hub_id is None or account not in ("", hub_id.partition("/")[0].lower(), *_names_file()["copies"]):
        return None
    packing = "-".join(_PACKING.findall(name)).upper()
    packed = f" ({packing} weights are packed for inference; LoRA trains the original)" if packing else ""
    return Match(hub_id, "" if hub_id == typed else f"{typed} -> {hub_id}{packed}")


def suggestions(typed: str) -> list[str]:
    """Return ids that begin with the name, and similar ids if fewer than two do."""
    ids = _ids_by_last_part()
    name = re.sub(r"[ _:]+", "-", _without_address(typed).rpartition("/")[2])
    matches = [hub_id for last, hub_id in ids.items() if last.startswith(f"{name}-")]
    if len(matches) < 2:
        matches += [ids[last] for last in difflib.get_close_matches(name, ids, n=_MAX_SUGGESTIONS)]
    return list(dict.fromkeys(matches))[:_MAX_SUGGESTIONS]


def _without_address(typed: str) -> str:
    address = r"^(https?://)?(huggingface\.co|hf\.co)/|/(tree|blob|resolve)/.*$|:latest$"
    return re.sub(address, "", typed.strip().lower()).strip("/ ")


@cache
def _ids_by_last_part() -> dict[str, str]:
    return {hub_id.lower().rpartition("/")[2]: hub_id for hub_id in entries()}


@cache
def _names_file() -> dict[str, Any]:
    return dict(json.loads(Path(__file__).with_name("names.json").read_text(encoding="utf-8")))


@cache
def _ids_by_name() -> dict[str, str]:
    ids = dict(_names_file()["names"])
    for family, template in _names_file()["tags"].items():
        pattern = re.compile(re.escape(template).replace(r"\{\}", "([^-]*)"))
        ids |= {f"{family}:{match[1].lower()}": hub_id for hub_id in entries() if (match := pattern.fullmatch(hub_id))}
    return ids | _ids_by_last_part()
