"""From a model's name as people type it to the hub id that the catalogue knows; never to another model.

Names are compared as sets of words: family, version, size, date. How the weights are packed (GGUF, AWQ, bnb-4bit) and by whom
is left out; whether a name is a chat model or a pretrained one is compared apart.
"""

from __future__ import annotations

import difflib
import re
from dataclasses import dataclass
from functools import cache

from finetune.model.catalogue import entries
from finetune.model.unknown_names import why_unknown

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
_IGNORED = {"hf", "meta", "nvidia", "latest", "model", "the"}
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
    """A parsed name. `terms`: family, version, size and date; `kind`: chat, base or nothing said."""

    account: str
    terms: frozenset[str]
    optional: frozenset[str]
    kind: str
    packing: str
    tagged: bool  # Ollama's `llama3.1:8b`, which is the chat model of that size

    @property
    def needed(self) -> frozenset[str]:
        """The terms without date and `v0.1`, which people leave out."""
        return self.terms - self.optional

    @property
    def size(self) -> float | None:
        """Billions of parameters, by the name."""
        sizes = [_SIZE.fullmatch(word) for word in self.terms]
        values = [(float((size[1] or "1x")[:-1]) * float(size[2])) / (1000 if size[3] == "m" else 1) for size in sizes if size]
        return max(values, default=None)

    @property
    def family(self) -> str:
        """The letters: `qwen`, `deepseek distill llama r`."""
        return " ".join(sorted(word for word in self.terms if word.isalpha()))

    @property
    def versions(self) -> frozenset[str]:
        return frozenset(word for word in self.terms if not word.isalpha() and not _SIZE.fullmatch(word)) - self.optional


def resolve(typed: str) -> Match | None:
    """The catalogue's id for `typed`; None when there is none, or more than one."""
    candidates = _candidates(typed)
    if len(candidates) != 1:
        return None
    packing = _parsed(typed).packing
    packed = f" ({packing} weights are packed for inference; LoRA trains the original)" if packing else ""
    return Match(candidates[0], "" if candidates[0] == typed else f"{typed} -> {candidates[0]}{packed}")


def is_known(typed: str) -> bool:
    """Whether `typed` names one or several models of the catalogue."""
    return bool(_candidates(typed))


def suggestions(typed: str, most: int = 4) -> list[str]:
    """Ids that may be meant, best first: the same words, or the same family with the nearest version and size.

    None for a name that is known to be another model's.
    """
    if why_unknown(typed):
        return []
    wanted = _parsed(typed)
    scores = {name: _likeness(wanted, parsed) for name, parsed in _parsed_entries().items()}
    best = max(scores.values())
    close = [name for name in scores if scores[name] >= max(_LEAST, best - 1)]
    candidates = _candidates(typed)
    return list(dict.fromkeys([*candidates, *sorted(close, key=lambda name: -scores[name])]))[:most]


def _likeness(wanted: _Name, entry: _Name) -> float:
    alike = difflib.SequenceMatcher(None, wanted.family, entry.family).ratio()
    own, other = set(wanted.family.split()), set(entry.family.split())
    if own and other and (other <= own or own <= other):  # as in my-llama-3.1-8b-finetune
        alike = max(alike, 0.85)
    if alike < 0.6:
        return 0.0
    score = 6 * alike + 3.0 * bool(wanted.versions & entry.versions) - 0.5 * len(wanted.versions ^ entry.versions)
    size = wanted.size or (
        entry.size if entry.size and f"{entry.size:g}" in wanted.versions - entry.versions else None
    )  # Qwen3-8
    if size and entry.size:
        score += 2.5 if size == entry.size else -min(2.0, abs(size - entry.size) / size)
    return score + 0.6 * (wanted.kind == entry.kind) + 0.3 * (wanted.account == entry.account) - 0.05 * len(entry.terms)


def _candidates(typed: str) -> list[str]:
    """Ids that `typed` can name: one, or all of an ambiguous name."""
    plain = _cleaned(typed)
    exact = [name for name in _parsed_entries() if plain in (name.lower(), name.lower().rpartition("/")[2])]
    wanted = _parsed(typed)
    if exact or not wanted.family:
        return exact
    eligible = {
        name: parsed for name, parsed in _parsed_entries().items()
        if not (parsed.packing and parsed.account in _COPIES)
        and (wanted.account in ("", parsed.account) or wanted.account in _COPIES)
    }  # fmt: skip
    same_words = [name for name, parsed in eligible.items() if parsed.terms == wanted.terms]
    loose = [name for name, parsed in eligible.items() if parsed.needed == wanted.terms and parsed.terms != wanted.terms]
    if wanted.tagged and same_words:
        return _of_kind(wanted.kind, same_words)
    matches = _of_kind(wanted.kind, same_words + loose)
    longer = [name for name, parsed in eligible.items() if parsed.terms > wanted.terms and name not in loose]
    longer = _of_kind(wanted.kind, longer)
    if wanted.kind and any(_parsed_entries()[name].kind == wanted.kind for name in matches):
        longer = [name for name in longer if _parsed_entries()[name].kind == wanted.kind]
    if same_words or not longer:
        return matches
    return matches + longer if matches else []


def _of_kind(kind: str, names: list[str]) -> list[str]:
    chats = {_parsed_entries()[name].terms for name in names if _parsed_entries()[name].kind == "chat"}
    plain = [name for name in names if _parsed_entries()[name].kind == ""]
    if not kind:
        return plain or names
    pretrained = [name for name in plain if entries()[name].pretrained or _parsed_entries()[name].terms in chats]
    explicit = [name for name in names if _parsed_entries()[name].kind == kind]
    return explicit + (pretrained if kind == "base" else [name for name in plain if name not in pretrained])


@cache
def _parsed_entries() -> dict[str, _Name]:
    return {name: _parsed(name) for name in entries()}


def _cleaned(typed: str) -> str:
    text = re.sub(r"^(https?://)?(huggingface\.co|hf\.co)/", "", typed.strip().lower())
    return re.sub(r"/(tree|blob|resolve)/.*$", "", text).strip("/ ")


def _parsed(typed: str) -> _Name:
    account, _, repo = _cleaned(typed).rpartition("/")
    name, _, tag = repo.partition(":")
    owner, underscore, own = name.partition("_")
    if underscore and owner in _owners():  # bartowski/Qwen_Qwen3-8B-GGUF
        name = own
    text = f"{name}-{tag}" if tag else name
    packing = "-".join(_PACKING.findall(text)).upper()
    text = re.sub(r"c4ai|\b\d\d-(?=20\d\d)", " ", _PACKING.sub(" ", text).replace("_", " "))
    tokens = _WORD.findall(re.sub(r"(\d)\s+([bm])\b", r"\1\2", text))
    kind = "chat" if _CHAT & set(tokens) else "base" if _BASE & set(tokens) else "chat" if tag else ""
    terms = {_version(word) if any(map(str.isdigit, word[:2])) else word for word in tokens} - _IGNORED - _CHAT - _BASE
    optional = {_version(word) for word in tokens if _OPTIONAL.fullmatch(word)}
    return _Name(_ACCOUNTS.get(account, account), frozenset(terms), frozenset(optional & terms), kind, packing, bool(tag))


def _version(word: str) -> str:
    """`v4.0` as 4, which people write, too."""
    return word.removeprefix("v").removesuffix(".0")


@cache
def _owners() -> set[str]:
    return {name.partition("/")[0].lower() for name in entries()}
