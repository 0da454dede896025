"""From a model's name as people type it to the hub id that the catalogue knows; never to another model.

Names are compared as sets of words: family, version, size, date. How the weights are packed (GGUF, AWQ, bnb-4bit) and by whom
is left out; whether a name is a chat model or a pretrained one is compared by itself.
"""

from __future__ import annotations

import difflib
import re
from dataclasses import dataclass
from functools import cache

from finetune.model.catalogue import entries

#: Accounts that publish copies of others' models under the same names: quantised, converted or without a gate.
_COPIES = {
    "bartowski", "casperhansen", "ggml-org", "hugging-quants", "lmstudio-community", "maziyarpanahi", "mlx-community",
    "mradermacher", "neuralmagic", "nousresearch", "quantfactory", "redhatai", "solidrust", "thebloke", "turboderp", "unsloth",
}  # fmt: skip
#: Other spellings of an account.
_ACCOUNTS = {"cohereforai": "coherelabs", "codellama": "meta-llama", "meta": "meta-llama", "mistral": "mistralai"}
_PACKED = (
    r"gguf|awq|gptq|exl[23]|mlx|bnb|nf4|fp[48]|nvfp4|mxfp4|hqq|eetq|aqlm|onnx|quantized|dynamic|imatrix|i1|unsloth"
    r"|w\d+a\d+|i?q\d+(?:_[a-z0-9]+)*|int[48]|[2-8]bits?|[2-8]bpw|bf16|fp16|f16"
)
_PACKING = re.compile(rf"(?<![a-z0-9])(?:{_PACKED})(?![a-z0-9])")
_CHAT, _BASE = {"instruct", "it", "chat", "inst", "instruction"}, {"base", "pt", "pretrained", "text"}
_IGNORED = {"hf", "meta", "latest", "model", "the"}
_WORD = re.compile(r"\d+x\d+(?:\.\d+)?b|[ae]?\d+(?:\.\d+)?[bmk](?![a-z0-9])|v?\d+(?:\.\d+)*|[a-z]+")
_SIZE = re.compile(r"(\d+x)?(\d+(?:\.\d+)?)([bm])")
_OPTIONAL = re.compile(r"\d{4}|v\d+(?:\.\d+)*")
#: Least likeness of a suggestion: the same family, or one misspelt letter with the same size.
_LEAST = 4.5


@dataclass(frozen=True)
class Match:
    """A hub id for a typed name, and how they differ, as a sentence."""

    name: str
    note: str


@dataclass(frozen=True)
class _Name:
    """A name taken apart. `words`: family, version, size and date; `kind`: chat, base or nothing said."""

    account: str
    words: frozenset[str]
    optional: frozenset[str]
    kind: str
    packing: str
    tagged: bool  # Ollama's `llama3.1:8b`, which is the chat model of that size

    @property
    def needed(self) -> frozenset[str]:
        """The words without date and `v0.1`, which people leave out."""
        return self.words - self.optional

    @property
    def size(self) -> float | None:
        """Billions of parameters in the name."""
        sizes = [_SIZE.fullmatch(word) for word in self.words]
        found = [(float((size[1] or "1x")[:-1]) * float(size[2])) / (1000 if size[3] == "m" else 1) for size in sizes if size]
        return max(found, default=None)

    @property
    def family(self) -> str:
        """The letters: `qwen`, `deepseek distill llama r`."""
        return " ".join(sorted(word for word in self.words if word.isalpha()))

    @property
    def versions(self) -> frozenset[str]:
        return frozenset(word for word in self.words if not word.isalpha() and not _SIZE.fullmatch(word)) - self.optional


def resolve(typed: str) -> Match | None:
    """The catalogue's id for `typed`; None when there is none, or more than one."""
    found = _candidates(typed)
    if len(found) != 1:
        return None
    packing = _parsed(typed).packing
    packed = f" ({packing} weights are packed for inference; LoRA trains the original)" if packing else ""
    return Match(found[0], "" if found[0] == typed else f"{typed} -> {found[0]}{packed}")


def is_known(typed: str) -> bool:
    """Whether `typed` names one or several models of the catalogue."""
    return bool(_candidates(typed))


def suggestions(typed: str, most: int = 4) -> list[str]:
    """Ids that may be meant, best first: the same words, or the same family with the nearest version and size."""
    wanted = _parsed(typed)
    scores = {name: _likeness(wanted, known) for name, known in _known().items()}
    best = max(scores.values())
    close = [name for name in scores if scores[name] >= max(_LEAST, best - 1)]
    found = _candidates(typed)
    return list(dict.fromkeys([*found, *sorted(close, key=lambda name: -scores[name])]))[:most]


def _likeness(wanted: _Name, known: _Name) -> float:
    alike = difflib.SequenceMatcher(None, wanted.family, known.family).ratio()
    own, other = set(wanted.family.split()), set(known.family.split())
    if own and other and (other <= own or own <= other):  # as in my-llama-3.1-8b-finetune
        alike = max(alike, 0.85)
    if alike < 0.6:
        return 0.0
    score = 6 * alike + 3.0 * bool(wanted.versions & known.versions) - 0.5 * len(wanted.versions ^ known.versions)
    size = wanted.size or (
        known.size if known.size and f"{known.size:g}" in wanted.versions - known.versions else None
    )  # Qwen3-8
    if size and known.size:
        score += 2.5 if size == known.size else -min(2.0, abs(size - known.size) / size)
    return score + 0.6 * (wanted.kind == known.kind) + 0.3 * (wanted.account == known.account) - 0.05 * len(known.words)


def _candidates(typed: str) -> list[str]:
    """Ids that `typed` can name: one, or all those that it does not tell apart."""
    plain = _cleaned(typed)
    exact = [name for name in _known() if plain in (name.lower(), name.lower().rpartition("/")[2])]
    wanted = _parsed(typed)
    if exact or not wanted.family:
        return exact
    known = {
        name: parsed for name, parsed in _known().items()
        if not parsed.packing and (wanted.account in ("", parsed.account) or wanted.account in _COPIES)
    }  # fmt: skip
    same = [name for name, parsed in known.items() if parsed.words == wanted.words]
    loose = [name for name, parsed in known.items() if parsed.needed == wanted.words and parsed.words != wanted.words]
    if wanted.tagged and same:
        return _of_kind(wanted.kind, same)
    found = _of_kind(wanted.kind, same + loose)
    longer = [name for name, parsed in known.items() if parsed.words > wanted.words and name not in loose]
    if same or not _of_kind(wanted.kind, longer):
        return found
    return found + _of_kind(wanted.kind, longer) if found else []


def _of_kind(kind: str, names: list[str]) -> list[str]:
    """Of names with the same words, those that are the chat model, or the pretrained one, or could be either."""
    chats = {_known()[name].words for name in names if _known()[name].kind == "chat"}
    plain = [name for name in names if _known()[name].kind == ""]
    if not kind:
        return plain or names
    pretrained = [name for name in plain if entries()[name].pretrained or _known()[name].words in chats]
    said = [name for name in names if _known()[name].kind == kind]
    return said + (pretrained if kind == "base" else [name for name in plain if name not in pretrained])


@cache
def _known() -> dict[str, _Name]:
    return {name: _parsed(name) for name in entries()}


def _cleaned(typed: str) -> str:
    text = re.sub(r"^(https?://)?(huggingface\.co|hf\.co)/", "", typed.strip().lower())
    return re.sub(r"/(tree|blob|resolve)/.*$", "", text).strip("/ ")


def _parsed(typed: str) -> _Name:
    account, _, rest = _cleaned(typed).rpartition("/")
    name, _, tag = rest.partition(":")
    owner, underscore, own = name.partition("_")
    if underscore and owner in _owners():  # bartowski/Qwen_Qwen3-8B-GGUF
        name = own
    text = f"{name}-{tag}" if tag else name
    packing = "-".join(_PACKING.findall(text)).upper()
    text = re.sub(r"c4ai|\b\d\d-(?=20\d\d)", " ", _PACKING.sub(" ", text).replace("_", " "))
    found = _WORD.findall(re.sub(r"(\d)\s+([bm])\b", r"\1\2", text))
    kind = "chat" if _CHAT & set(found) else "base" if _BASE & set(found) else "chat" if tag else ""
    words = {word.removeprefix("v") if word[1:2].isdigit() else word for word in found} - _IGNORED - _CHAT - _BASE
    optional = {word.removeprefix("v") for word in found if _OPTIONAL.fullmatch(word)}
    return _Name(_ACCOUNTS.get(account, account), frozenset(words), frozenset(optional & words), kind, packing, bool(tag))


@cache
def _owners() -> set[str]:
    return {name.partition("/")[0].lower() for name in entries()}
