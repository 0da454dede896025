"""Find unused columns and message fields that may change the meaning of a row; they stop a run."""

from __future__ import annotations

import hashlib
import json
import re
import shlex
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any

from finetune.data.checks import SPLITS, BadRow, Values, is_blank
from finetune.data.report import printable

_PREFERENCE = "a choice between two answers (for DPO)"
_LABEL = "a good or bad label (for KTO), or a class"
_PICTURE = "images, but no column is mapped to them"
_MEDIA = "audio, video or processed images; only text and images can be trained on"
REASONING = "the reasoning before an answer"
_WEIGHT = "a weight of the row or message"
_SCORE = "a quality score"
CONTEXT = "part of the prompt"
_TOOLS = "tools or tool calls"
_SPLIT = "a split of the rows"

#: Column name in lower case without marks between its words -> meaning of the values. Columns that are read are not looked up.
_MEANINGS = {
    name.replace("_", ""): meaning
    for meaning, names in (
        (_PREFERENCE, "chosen rejected chosen_response rejected_response response_j response_k"),
        (_LABEL, "label labels kto_tag"),
        (_PICTURE, "image images image_url"),
        (_MEDIA, "video videos audio audios pixel_values"),
        (REASONING, "reasoning_content reasoning thinking thought thoughts cot complex_cot chain_of_thought rationale think "
         "thinking_content think_content reasoning_text thought_process thinking_process reasoning_process reasoning_trace "
         "thinking_trajectory reasoning_steps"),
        (_WEIGHT, "weight weights sample_weight train trainable training loss loss_mask mask train_detail"),
        (_SCORE, "score scores rating ratings reward rewards score_chosen score_rejected"),
        (CONTEXT, "system system_prompt context input history documents"),
        (_TOOLS, "tools functions tool_calls function_call function_calls"),
        (_SPLIT, "split"),
    )
    for name in names.split()
}  # fmt: skip
#: Beside plain text a score, as corpora from the web have it, doesn't change it.
_DECIDED_BY_VALUES_FOR_TEXT = (_SCORE, CONTEXT, REASONING)
#: What stands in a text for an image, a sound or a video.
MEDIA_TAGS = ("<image>", "<video>", "<audio>")
#: Weights that change nothing.
_NEUTRAL_WEIGHTS = (1, "1", "1.0", "true", "True")


@lru_cache(4096)
def meaning_of(name: Any) -> str:
    """Return the meaning of a column or field by its name; empty if unknown."""
    return _MEANINGS.get(re.sub(r"[\W_]+", "", name.lower()), "") if isinstance(name, str) else ""


def _changes_meaning(name: Any, value: Any, format_name: str, *, in_message: bool) -> bool | None:
    """Return whether a column or field changes the meaning of a row; None if undecided by name."""
    meaning = meaning_of(name)
    if not meaning or (format_name == "text" and meaning in _DECIDED_BY_VALUES_FOR_TEXT):
        return None
    if meaning == _SPLIT and not (isinstance(value, str) and value in SPLITS):
        return None
    if meaning == _SPLIT or (in_message and meaning == CONTEXT):
        return not in_message and value != SPLITS[0]
    return not is_blank(value) and (in_message or not (meaning == _WEIGHT and value in _NEUTRAL_WEIGHTS))


#: What to do about a column or field, by its meaning.
_FIXES = {
    _PICTURE: "To train on the images:  dataset.columns={images: NAME}  (in addition to the columns already mapped)",
    _LABEL: "To train on good and bad answers:  method=kto\n"
    "To train on good answers only:  jq -c 'select(.[NAME] == (true, 1)) | del(.[NAME])' FILE > good.jsonl",
    REASONING: "To train on it, put it before the answer in the model's format, for example <think>...</think>, "
    "or in reasoning_content of the message.",
    _WEIGHT: "A message can have train: true or false, or weight: 0 or 1. Rows can't be weighted: repeat or remove them.",
    _SCORE: "Filter the rows by it, then leave the column out.",
    _SPLIT: "To hold rows out:  dataset.eval_split=SPLIT  (training uses dataset.split, train)",
    _TOOLS: "Put tools in a column `tools` next to the conversation, and calls in `tool_calls` of an assistant message.",
}


def check_placeholders(row: Values, texts: Iterable[str]) -> None:
    """Raise BadRow for a text with a tag for media that is left out."""
    tags = (tag for text in texts for tag in MEDIA_TAGS if tag in text)
    if any(meaning_of(name) in (_PICTURE, _MEDIA) and not is_blank(row[name]) for name in row) and (tag := next(tags, None)):
        raise BadRow(None, f"has {tag} in its text, but the media column is left out")


#: Different values that are counted. Short texts that differ as often are no names of sources.
_MAX_VALUES = 100
_FIRST_ROWS = 3
COLUMNS, FIELDS = "columns", "message fields"
#: The kind of values whose column's name says that they change the meaning of a row.
NAMED = "named"


@dataclass
class ColumnUse:
    """Rows, or messages of a field, with a value in an unused column."""

    count: int = 0
    first_rows: list[int] = field(default_factory=list)
    last_row: int = 0
    kinds: set[str] = field(default_factory=set)
    values: set[str] = field(default_factory=set)

    def add(self, number: int, kinds: set[str], value: Any) -> None:
        # known names are counted by row
        self.count += kinds != {NAMED} or number != self.last_row
        self.last_row = number
        if len(self.first_rows) < _FIRST_ROWS and number not in self.first_rows:
            self.first_rows.append(number)
        self.kinds.update(kinds)
        # two values show that a column isn't constant; more are counted only for short texts, which may be prose
        if len(self.values) < 2 or (len(self.values) < _MAX_VALUES and "label" in self.kinds and "text" not in self.kinds):
            self.values.add(_digest(value))

    def merge(self, other: ColumnUse) -> None:
        self.count += other.count
        self.first_rows = sorted({*self.first_rows, *other.first_rows})[:_FIRST_ROWS]
        self.kinds |= other.kinds
        self.values |= other.values


@dataclass
class UnusedColumns:
    """Unused columns and message fields of a source."""

    file: str
    format: str
    #: Usable rows, and their messages.
    totals: dict[str, int] = field(default_factory=lambda: {COLUMNS: 0, FIELDS: 0})
    uses: dict[str, dict[str, ColumnUse]] = field(default_factory=lambda: {COLUMNS: {}, FIELDS: {}})

    def merge(self, other: UnusedColumns) -> None:
        for owner, uses in other.uses.items():
            self.totals[owner] += other.totals[owner]
            for name, use in uses.items():
                self.uses[owner].setdefault(name, ColumnUse()).merge(use)

    def add(self, owner: str, unread: Values, number: int, texts: Sequence[str] = ()) -> None:
        """Add unread columns or fields of a usable row; `texts` are read from the row."""
        self.totals[owner] += 1
        for name, value in unread.items():
            changes = _changes_meaning(name, value, self.format, in_message=owner == FIELDS)
            if changes is False:
                continue
            use, kinds = self.uses[owner].setdefault(name, ColumnUse()), {NAMED} if changes else kinds_of(name, value, texts)
            # the column repeats all texts that are read, as Alpaca's `text` does
            if len(texts) > 1 and isinstance(value, str) and texts[-1] in value and all(text in value for text in texts):
                kinds = kinds & {NAMED} or {"copy"}
            if kinds:
                use.add(number, kinds, value)

    @property
    def stops_run(self) -> bool:
        """Return whether `asked` will name a column, whatever rows follow."""
        return bool(self.asked(all_rows=False))

    def asked(self, *, all_rows: bool = True) -> dict[str, ColumnUse]:
        """Return the columns that stop a run, those with known names first; `all_rows`: no row follows."""
        uses = ((owner, name, use) for owner, uses in self.uses.items() for name, use in uses.items())
        asked = [(name, use) for owner, name, use in uses if self._stops(owner, name, use, all_rows)]
        return dict(sorted(asked, key=lambda item: NAMED not in item[1].kinds))

    def _stops(self, owner: str, name: str, use: ColumnUse, all_rows: bool) -> bool:
        if NAMED in use.kinds:
            # a `split` in all rows is no mixture
            return name != "split" or (all_rows and (use.count, use.kinds) != (self.totals[owner], {NAMED}))
        # short texts that nearly all differ are prose
        is_prose = all_rows and "label" in use.kinds and len(use.values) >= min(_MAX_VALUES, max(4, use.count // 2))
        kinds = use.kinds | {"text"} if is_prose else use.kinds
        # a single row can't show that a value is constant
        differ = len(use.values) > 1 or use.count < max(self.totals[owner], 1 + all_rows)  # or some rows have none
        is_flag = owner == FIELDS and bool(kinds & {"truth", "bit"})
        return use.count > 0 and (differ or is_flag) and not is_harmless(name, kinds, has_answer=self.format != "text")

    def problems(self, asked: dict[str, ColumnUse]) -> list[str]:
        """Return a line for each known name, and a line for all unknown names."""
        lines = [
            f"{self.file}: '{printable(name)}' is not used, and it looks like {meaning_of(name)}: {use.count:,} row(s), first "
            f"{', '.join(map(str, use.first_rows))}{', ...' if use.count > len(use.first_rows) else ''}"
            for name, use in asked.items()
            if NAMED in use.kinds
        ]
        for owner, uses in self.uses.items():
            unknown = {name: use for name, use in asked.items() if uses.get(name) is use and NAMED not in use.kinds}
            described = [f"{printable(name)} ({describe(use.kinds)})" for name, use in unknown.items()]
            if described:
                lines.append(f"{self.file}: unused {owner} may change what the model learns: {', '.join(described)}")
        return lines


def fixes_of(asked: dict[str, ColumnUse], file: str) -> list[str]:
    """Return fixes for columns and fields with known names."""
    fixes: dict[str, str] = {}
    for name, use in asked.items():
        meaning = meaning_of(name)
        split = next((split for split in SPLITS if _digest(split) in use.values), "test")
        text = _FIXES.get(meaning, "").replace("NAME", json.dumps(name)).replace("SPLIT", split)
        fixes.setdefault(meaning, text.replace("FILE", shlex.quote(file)))
    return [fix for fix in fixes.values() if fix]


def _digest(value: Any) -> str:
    return hashlib.blake2b(repr(value).encode("utf-8", "surrogatepass"), digest_size=8).hexdigest()


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


def _word_set(text: str) -> set[str]:
    return {*text.split()}


#: Fields of messages in other columns, which repeat fields that are read.
_ROLES = ("role", "from")
_INTEGERS = {"integer", "bit"}
_NUMBERS = {"float", *_INTEGERS}
_SHORT = {"word", "token", "label", "identifier"}
_COUNTS = _word_set("length len count counts tokens turn turns words chars characters size bytes perplexity")
#: Topics of questions; beside plain text they may be the label to learn.
_CLASSES = _word_set(
    "category categories topic topics domain domains task tasks type types subject subjects genre difficulty level tag tags "
    "keyword keywords skill skills area theme subcategory subtopic"
)
#: Words of names, and the kinds of values that they are harmless with.
_FAMILIES = (
    (_word_set("id ids uuid guid uid idx index hash sha sha1 sha256 md5 checksum fingerprint digest rowid doi unnamed"),
     {"identifier", "token", "url", "date", *_INTEGERS}),
    (_word_set("source sources origin dataset corpus model generator engine author license licence copyright publisher "
               "site website file filename filepath path repo repository dump username annotator worker contributor provider "
               "version"),
     {*_SHORT, "url"}),
    (_word_set("url urls uri link links href homepage avatar thumbnail"), {"url", "token", "word", "identifier"}),
    (_word_set("lang language languages locale country script"), {"word", "token", "label"}),
    (_word_set("date time timestamp datetime year month created updated modified published retrieved crawled at utc"),
     {"date", "identifier", *_NUMBERS}),
    (_word_set("meta metadata"), {*_SHORT, "url", "date", *_NUMBERS}),
    (_CLASSES, {*_SHORT, *_NUMBERS}),
)  # fmt: skip
#: Names with these words, such as vote_count, are harmless only as copies of a trained text.
JUDGEMENTS = _word_set(
    "correct incorrect vote votes upvotes like likes dislikes error errors winner chosen rejected best verdict toxicity"
)
#: Media: the path or address of an image, a sound or a video is a part of the question.
_MEDIA_WORDS = _word_set(
    "image images img imgs picture pictures photo photos screenshot screenshots video videos audio audios speech frame frames"
)
#: Names with these words are harmless only with a length or count: response_tokens, but not answer_id.
_ANSWERS = _word_set(
    "answer answers label labels target targets class choice choices option options gold solution output response completion "
    "expected truth intent sentiment summary translation"
)
#: Columns of corpora from the web, beside plain text: how well a classifier likes a page.
_TEXT_SCORES = ("score", "scores", "int_score", "language_score")


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
            if is_inside and kind != "copy" and set(words_of(leaf_name)) & (JUDGEMENTS | _ANSWERS | _MEDIA_WORDS):
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
    if name_words & _COUNTS and values <= _NUMBERS:
        return True
    if name_words & (_ANSWERS | _MEDIA_WORDS) or (not has_answer and name_words & _CLASSES):
        return False
    if values <= ({"url", "identifier", "date"} if has_answer else {"url", "identifier"}):
        return True
    if any(name_words & names and values <= allowed for names, allowed in _FAMILIES):
        return True
    return not has_answer and name.lower() in _TEXT_SCORES and values <= _NUMBERS


def describe(kinds: set[str]) -> str:
    """Describe kinds: text, truth values or numbers."""
    parts = [("truth values", kinds & {"truth"}), ("numbers", kinds & _NUMBERS), ("text", kinds - _NUMBERS - {"truth"})]
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
