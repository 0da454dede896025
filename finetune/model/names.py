"""From a model's name as people type it to the hub id in the catalogue; never to another model.

A name is known if it is an id, an id without its account, a packed copy (GGUF, AWQ, bnb-4bit) of a model, or in names.json.
Case, spaces and punctuation do not count, nor how a name says that it is a chat model.
"""

from __future__ import annotations

import difflib
import json
import re
from collections import defaultdict
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from finetune.model.catalogue import entries
from finetune.model.unknown_names import why_unknown

_PACKED = (
    r"gguf|awq|gptq|exl[23]|mlx|bnb|nf4|fp[48]|nvfp4|mxfp4|hqq|eetq|aqlm|onnx|quantized|dynamic|imatrix|i1|unsloth"
    r"|w\d+a\d+|i?q\d+(?:_[a-z0-9]+)*|int[48]|[2-8]bits?|[2-8]bpw|bf16|fp16|f16"
)
_PACKING = re.compile(rf"(?<![a-z0-9])(?:{_PACKED})(?![a-z0-9])")
_CHAT = re.compile(r"(instruct|instruction|inst|chat|it)$")


@dataclass(frozen=True)
class Match:
    """A hub id for a typed name, and how they differ, as a sentence."""

    name: str
    note: str


def resolve(typed: str) -> Match | None:
    """Return the catalogue's id for `typed`; None if no id or several ids match."""
    names = _named(typed)
    if len(names) != 1:
        return None
    packing = "-".join(_PACKING.findall(_cleaned(typed).rpartition("/")[2])).upper()
    packed = f" ({packing} weights are packed for inference; LoRA trains the original)" if packing else ""
    return Match(names[0], "" if names[0] == typed else f"{typed} -> {names[0]}{packed}")


def is_known(typed: str) -> bool:
    """Return whether `typed` names a model of the catalogue, or begins the names of several."""
    return bool(_named(typed) or _begun(typed))


def suggestions(typed: str, most: int = 4) -> list[str]:
    """Return ids with a similar name, best first; none for the name of a model that is known not to be in the catalogue."""
    if why_unknown(typed):
        return []
    begun = _begun(typed)
    if len(begun) > 1:
        return begun[:most]
    similar = difflib.get_close_matches(_hyphenated(typed), _last_parts(), n=most)
    return list(dict.fromkeys([*begun, *(_last_parts()[name] for name in similar)]))[:most]


def _named(typed: str) -> list[str]:
    if exact := [hub_id for last, hub_id in _last_parts().items() if _cleaned(typed) in (last, hub_id.lower())]:
        return exact
    account, _, name = _cleaned(typed).rpartition("/")
    account = _table()["accounts"].get(account, account)
    owner, underscore, own_name = name.partition("_")
    if underscore and owner in {hub_id.partition("/")[0].lower() for hub_id in entries()}:  # bartowski/Qwen_Qwen3-8B-GGUF
        name = own_name
    names = _ids().get(_key(name), [])
    is_copy = not account or account in _table()["copies"]
    return [name for name in names if is_copy or name.lower().partition("/")[0] == account]


def _begun(typed: str) -> list[str]:
    name = "/" if "/" in typed else _hyphenated(typed)
    return [hub_id for last, hub_id in _last_parts().items() if last.startswith(f"{name}-")]


def _hyphenated(typed: str) -> str:
    return re.sub(r"[ _:]+", "-", _cleaned(typed).rpartition("/")[2])


@cache
def _last_parts() -> dict[str, str]:
    return {hub_id.lower().rpartition("/")[2]: hub_id for hub_id in entries()}


def _cleaned(typed: str) -> str:
    text = re.sub(r"^(https?://)?(huggingface\.co|hf\.co)/", "", typed.strip().lower())
    return re.sub(r"/(tree|blob|resolve)/.*$", "", text).strip("/ ")


def _squeezed(name: str) -> str:
    hyphenated = re.sub(r"[^a-z0-9.]+", "-", name.lower())
    return re.sub(r"(?<!\d)-|-(?!\d)", "", hyphenated)  # between numbers it stays: gemma-2-2b is not gemma-22b


def _key(name: str) -> str:
    """Return the name without packing and punctuation; `+chat` or `+base` in place of a last word that says so."""
    family, _, tag = _PACKING.sub("", name).rstrip("-_:. ").partition(":")
    if tag not in ("", "latest"):
        return f"{_squeezed(family)}:{_CHAT.sub('', _squeezed(tag))}"
    return re.sub(r"(base|pt)$", "+base", _CHAT.sub("+chat", _squeezed(family).removesuffix("hf")))


@cache
def _table() -> dict[str, Any]:
    table: dict[str, Any] = json.loads(Path(__file__).with_name("names.json").read_text(encoding="utf-8"))
    return table


@cache
def _ids() -> dict[str, list[str]]:
    ids = defaultdict(list)
    for name in entries():
        account, _, last = name.lower().partition("/")
        if not (account in _table()["copies"] and _PACKING.search(last)):
            ids[_key(last)].append(name)
    for family, template in _table()["tags"].items():
        before, after = template.split("{}")
        for name in entries():
            size = name.removeprefix(before).removesuffix(after)
            if name == f"{before}{size}{after}" and "-" not in size:
                ids[_key(f"{family}:{size.lower()}")].append(name)
    for short, name in _table()["names"].items():
        ids.setdefault(_key(short), [name])
    return dict(ids)
