"""Classify the values of an unused column, and decide whether the column is harmless."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from typing import Any

from finetune.data.checks import is_blank

_MONTH = r"(?:jan|feb|mar|apr|may|jun|jul|aug|sep|oct|nov|dec)[a-z]*"
_CLOCK = r"[\d:.,+apmutcgz ()-]{0,24}"
_PATTERNS = {
    "truth": "(?i:true|false|yes|no)",
    "bit": "[01]",
    "integer": r"[+-]?\d{1,15}",
    "url": r"(?:https?|ftp|s3|gs|hf|file)://\S+|www\.\S+",
    "uuid": "[0-9a-fA-F]{8}-(?:[0-9a-fA-F]{4}-){3}[0-9a-fA-F]{12}",
    "hash": r"(?=\D*\d)(?:[0-9a-f]{16,128}|[0-9A-F]{16,128})",
    "float": r"[+-]?(?:\d+\.\d*|\.\d+|\d+)(?:[eE][+-]?\d+)?",
    "date": r"\d{4}-\d{1,2}(?:-\d{1,2}(?:[T ]\d{1,2}:\d{2}\S*(?: ?\S{1,6})?)?)?|\d{1,2}[./]\d{1,2}[./]\d{2,4}"
    r"|\d{4}/\d{1,2}/\d{1,2}"
    rf"|(?i:(?:\w{{3,9}},? )?(?:\d{{1,2}} {_MONTH}|{_MONTH}(?: \d{{1,2}})?),? {_CLOCK}\d{{4}}{_CLOCK})",
    "word": r"[A-Z]?[^\W\d_A-Z]{1,24}|[A-Z]{1,12}",
}
_ANY_KIND = re.compile("|".join(f"(?P<{kind}>{pattern})" for kind, pattern in _PATTERNS.items()))
_LONG_URL = re.compile(_PATTERNS["url"])
_LABEL_CHARACTERS, _LABEL_WORDS = 64, 6
#: Scripts that write no spaces: a longer text is a sentence.
_UNSPACED = re.compile("[\u0e00-\u0e7f\u3040-\u30ff\u3400-\u9fff\uac00-\ud7af]")
_UNSPACED_CHARACTERS = 8
_TOKEN_CHARACTERS, _URL_CHARACTERS = 200, 2_000
#: Nested values with more leaves are not looked at one by one.
_MAX_LEAVES = 200


def _word_set(text: str) -> frozenset[str]:
    return frozenset(text.split())


#: Fields of messages in other columns, which repeat fields that are read.
_ROLES = ("role", "from")
_NUMBERS = {"integer", "bit"}
_SHORT = {"word", "token", "label", "identifier"}
#: Words of names -> the kinds of values that they are harmless with.
_COUNTS = _word_set("length len count counts tokens turn turns words chars characters size bytes perplexity")
_FAMILIES: tuple[tuple[frozenset[str], frozenset[str]], ...] = tuple(
    (_word_set(names), frozenset(kinds))
    for names, kinds in (
        ("id ids uuid guid uid idx index hash sha sha1 sha256 md5 checksum fingerprint digest rowid doi unnamed",
         {"identifier", "token", "url", "date", *_NUMBERS}),
        ("source sources origin dataset corpus model generator engine author license licence copyright publisher site website "
         "file filename filepath path repo repository dump username annotator worker contributor provider version",
         {*_SHORT, "url"}),
        ("url urls uri link links href homepage avatar thumbnail", {"url", "token", "word", "identifier"}),
        ("lang language languages locale country script", {"word", "token", "label"}),
        ("date time timestamp datetime year month created updated modified published retrieved crawled at utc",
         {"date", "float", "identifier", *_NUMBERS}),
        ("meta metadata", {*_SHORT, "url", "date", "float", *_NUMBERS}),
    )
)  # fmt: skip
#: Topics of questions; beside plain text they may be the label to learn.
_CLASSES = _word_set(
    "category categories topic topics domain domains task tasks type types subject subjects genre difficulty level tag tags "
    "keyword keywords skill skills area theme subcategory subtopic"
)
_CLASS_KINDS = frozenset({*_SHORT, "float", *_NUMBERS})
#: Names with these words, such as vote_count, are harmless only as copies of a trained text.
JUDGEMENTS = _word_set(
    "correct incorrect vote votes upvotes like likes dislikes error errors winner chosen rejected best verdict toxicity"
)
#: Media: the path or address of an image, a sound or a video is a part of the question.
_MEDIA = _word_set(
    "image images img imgs picture pictures photo photos screenshot screenshots video videos audio audios speech frame frames"
)
#: Names with these words are harmless only with a length or count: response_tokens, but not answer_id.
_ANSWERS = _word_set(
    "answer answers label labels target targets class choice choices option options gold solution output response completion "
    "expected truth intent sentiment summary translation"
)
#: Columns of corpora from the web, beside plain text: how well a classifier likes a page.
_TEXT_SCORES = frozenset({"score", "scores", "int_score", "language_score"})


def kinds_of(name: str, value: Any, texts: Iterable[str] = ()) -> set[str]:
    """Return the kinds of a value, or of nested values that aren't harmless by name."""
    kinds: set[str] = set()
    for index, (leaf_name, leaf) in enumerate(_leaves(name, value)):
        if index == _MAX_LEAVES:
            return kinds | {"text"}
        if is_blank(leaf):
            continue
        # `texts` are read, so a copy adds nothing
        kind = "copy" if isinstance(leaf, str) and leaf.strip() in texts else _kind(leaf)
        is_inside = leaf_name != name
        if not (is_inside and (leaf_name in _ROLES or is_harmless(leaf_name, {kind}, has_answer=True))):
            kinds.add(kind)
            if is_inside and kind != "copy" and set(words_of(leaf_name)) & (JUDGEMENTS | _ANSWERS | _MEDIA):
                kinds.add("text")  # metadata: {label: bad} is no metadata
    return kinds


def is_harmless(name: str, kinds: set[str], *, has_answer: bool) -> bool:
    """Return whether a column doesn't change the meaning of a row."""
    # a name alone proves nothing: a `source` may be where a row is from, or a sentence to translate
    name_words = set(words_of(name))
    if kinds <= {"copy"}:
        return True
    values = kinds - {"copy"}
    if name_words & JUDGEMENTS:
        return False
    if name_words & _COUNTS and values <= {"float", *_NUMBERS}:
        return True
    if name_words & (_ANSWERS | _MEDIA) or (not has_answer and name_words & _CLASSES):
        return False
    if values <= ({"url", "identifier", "date"} if has_answer else {"url", "identifier"}):
        return True
    if any(name_words & names and values <= allowed for names, allowed in _FAMILIES):
        return True
    if has_answer:
        return bool(name_words & _CLASSES) and values <= _CLASS_KINDS
    return name.lower() in _TEXT_SCORES and values <= {"float", *_NUMBERS}


def describe(kinds: set[str]) -> str:
    """Describe kinds: text, truth values or numbers."""
    numbers = {"float", *_NUMBERS}
    parts = [("truth values", kinds & {"truth"}), ("numbers", kinds & numbers), ("text", kinds - numbers - {"truth"})]
    return " and ".join(text for text, present in parts if present)


def words_of(name: str) -> list[str]:
    """Split a name (answer_id, AnswerId) into words in lower case."""
    return re.findall(r"[a-z]+\d*|\d+", re.sub(r"([a-z0-9])([A-Z])", r"\1 \2", name).lower()) or [name.strip() or "unnamed"]


def _leaves(name: str, value: Any) -> Iterator[tuple[str, Any]]:
    if isinstance(value, dict):
        for key, item in value.items():
            yield from _leaves(str(key), item)
    elif isinstance(value, (list, tuple)):
        for item in value:
            yield from _leaves(name, item)
    else:
        yield name, value


def _kind(value: Any) -> str:
    if isinstance(value, bool):
        return "truth"
    if isinstance(value, (int, float)):
        return "bit" if value in (0, 1) else "integer" if isinstance(value, int) or value.is_integer() else "float"
    return _text_kind(value.strip()) if isinstance(value, str) else "date" if hasattr(value, "isoformat") else "text"


def _text_kind(text: str) -> str:
    if len(text) > _TOKEN_CHARACTERS or "\n" in text:
        return "url" if len(text) < _URL_CHARACTERS and _LONG_URL.fullmatch(text) else "text"
    if not text.isascii() and len(text) > _UNSPACED_CHARACTERS and _UNSPACED.search(text):
        return "text"
    if match := _ANY_KIND.fullmatch(text):
        return "identifier" if match.lastgroup in ("uuid", "hash") else str(match.lastgroup)
    if " " not in text and "\t" not in text:
        return "token"
    is_sentence = text[-1] in ".!?:;" or "?" in text or len(text) > _LABEL_CHARACTERS or len(text.split()) > _LABEL_WORDS
    return "text" if is_sentence else "label"
