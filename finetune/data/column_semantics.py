"""Find unused columns and message fields that may change the meaning of a row; they stop a run."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any

from finetune.data.checks import SPLITS, BadRow, Values, is_blank
from finetune.data.report import override, printable
from finetune.errors import DataError

REASONING = "reasoning"
_IMAGE, _MEDIA, _LABEL, _WEIGHT, _SCORE, _PROMPT, _SPLIT = "image", "media", "label", "weight", "score", "prompt", "split"
#: Column name in lower case without underscores -> its meaning. Such a column stops a run although all its values may be equal.
_MEANINGS = {
    name.replace("_", ""): meaning
    for meaning, names in (
        ("pair", "chosen rejected chosen_response rejected_response response_j response_k"),
        (_LABEL, "label labels kto_tag"),
        (_IMAGE, "image images image_url"),
        (_MEDIA, "video videos audio audios pixel_values"),
        (REASONING, "reasoning_content reasoning thinking thought thoughts cot complex_cot chain_of_thought rationale think "
         "thinking_content think_content reasoning_text thought_process thinking_process reasoning_process reasoning_trace "
         "thinking_trajectory reasoning_steps"),
        (_WEIGHT, "weight weights sample_weight train trainable training loss loss_mask mask train_detail"),
        (_SCORE, "score scores rating ratings reward rewards score_chosen score_rejected"),
        (_PROMPT, "system system_prompt context input history documents"),
        ("tools", "tools functions tool_calls function_call function_calls"),
        (_SPLIT, "split"),
    )
    for name in names.split()
}  # fmt: skip
#: Meanings for which a name alone doesn't stop a run on plain text: web corpora have a score for each page.
_DECIDED_BY_VALUES_FOR_TEXT = (_SCORE, _PROMPT, REASONING)
MEDIA_TAGS = ("<image>", "<video>", "<audio>")  # placeholders in a text for an image, a video or a sound
_FIXES = {
    _LABEL: "To train on good and bad answers:  method=kto",
    _IMAGE: "To train on the images, map their column to `images` with dataset.columns, beside the mapped columns.",
    _SPLIT: "To hold rows out, name their split as dataset.eval_split (training uses dataset.split, train).",
}


@lru_cache(4096)
def meaning_of(name: Any) -> str:
    """Return the meaning of a column or field by its name; empty if unknown."""
    return _MEANINGS.get(re.sub(r"[\W_]+", "", name.lower()), "") if isinstance(name, str) else ""


def _changes_meaning(name: Any, value: Any, format_name: str, *, in_message: bool) -> bool | None:
    meaning = meaning_of(name)
    is_other_split = meaning == _SPLIT and not (isinstance(value, str) and value in SPLITS)
    if not meaning or is_other_split or (format_name == "text" and meaning in _DECIDED_BY_VALUES_FOR_TEXT):
        return None  # the name doesn't decide: `add` looks at the value
    if in_message and meaning in (_SPLIT, _PROMPT):
        return False
    if meaning == _SPLIT:
        return value != "train"
    is_neutral = meaning == _WEIGHT and not in_message and value in (1, "1", "1.0", "true", "True")
    return not is_blank(value) and not is_neutral


def check_media_tags(row: Values, texts: Iterable[str]) -> None:
    """Raise BadRow if a text has a tag such as <image>, but the column with the media is not used."""
    has_media = any(meaning_of(name) in (_IMAGE, _MEDIA) and not is_blank(value) for name, value in row.items())
    tag = next((tag for text in texts for tag in MEDIA_TAGS if tag in text), None) if has_media else None
    if tag:
        raise BadRow(None, f"has {tag} in its text, but the media column is left out")


FIELD = "messages[]."  # prefix of the name of a message's field


@dataclass
class ColumnUse:
    """The values of an unused column or message field."""

    count: int = 0
    named_count: int = 0  # of values whose column's name alone says that they change the meaning of a row
    kinds: set[str] = field(default_factory=set)
    hashes: set[int] = field(default_factory=set)  # of two values at most: enough to see that a column isn't constant


@dataclass
class UnusedColumns:
    """Unused columns and message fields of a source."""

    file: str
    format: str
    #: Number of usable rows (prefix ""), and of their messages.
    totals: dict[str, int] = field(default_factory=lambda: {"": 0, FIELD: 0})
    uses: dict[str, ColumnUse] = field(default_factory=dict)

    def merge(self, other: UnusedColumns) -> None:
        self.totals = {prefix: count + other.totals[prefix] for prefix, count in self.totals.items()}
        for name, other_use in other.uses.items():
            use = self.uses.setdefault(name, ColumnUse())
            use.count += other_use.count
            use.named_count += other_use.named_count
            use.kinds |= other_use.kinds
            use.hashes |= other_use.hashes

    def add(self, prefix: str, unread: Values, texts: Sequence[str] = ()) -> None:
        """Count unread columns or fields of a usable row; `texts`: all texts of the row."""
        self.totals[prefix] += 1
        for name, value in unread.items():
            changes_meaning = _changes_meaning(name, value, self.format, in_message=prefix == FIELD)
            if changes_meaning is False:
                continue
            use = self.uses.setdefault(f"{prefix}{name}", ColumnUse())
            # the column repeats all texts that are read, as Alpaca's `text` does
            is_copy = len(texts) > 1 and isinstance(value, str) and all(text in value for text in texts)
            kinds = {"copy"} if is_copy else kinds_of(name, value, texts)
            if kinds or changes_meaning:
                use.count += 1
                use.named_count += bool(changes_meaning)
                use.kinds |= kinds
                if len(use.hashes) < 2:
                    use.hashes.add(hash(repr(value)))  # forks have the same seed of hashes

    @property
    def stops_run(self) -> bool:
        """Return whether a column stops the run, whatever rows follow."""
        return bool(self.blocking(all_rows_read=False))

    def blocking(self, *, all_rows_read: bool = True) -> list[str]:
        """Return the columns and fields that stop a run, those with known names first."""
        names = [name for name, use in self.uses.items() if self._blocks(name, use, all_rows_read)]
        return sorted(names, key=lambda name: not self.uses[name].named_count)

    def _blocks(self, name: str, use: ColumnUse, all_rows_read: bool) -> bool:
        in_message, field_name = name.startswith(FIELD), name.removeprefix(FIELD)
        total = self.totals[FIELD if in_message else ""]
        if use.named_count:  # a file whose rows all have another split than train is no mixture
            return field_name != "split" or (all_rows_read and use.named_count != total)
        # all rows have the same value; a single row can't show that
        is_constant = len(use.hashes) == 1 and use.count >= max(total, 2 if all_rows_read else 1)
        is_flag = in_message and bool(use.kinds & {"truth", "bit"})
        may_matter = use.count > 0 and (is_flag or not is_constant)
        return may_matter and not is_harmless(field_name, use.kinds, has_answer=self.format != "text")

    def error(self, blocking: list[str], ignored: list[str]) -> DataError:
        """Return the error of columns that stop a run; `ignored` are columns that the recipe leaves out."""
        names = list(dict.fromkeys(name.removeprefix(FIELD) for name in blocking))
        described = []
        for name in blocking:
            kinds = self.uses[name].kinds
            groups = {"truth values": kinds & {"truth"}, "numbers": kinds & NUMBERS, "text": kinds - NUMBERS - {"truth"}}
            listing = " and ".join(label for label, group in groups.items() if group)
            described.append(printable(name) + (f" ({listing})" if listing else ""))
        fixes = [fix for meaning, fix in _FIXES.items() if meaning in map(meaning_of, names)]
        if not all(name.startswith(FIELD) for name in blocking):
            fields = "instruction, input, output, system, reasoning"
            fixes.append(f"To train on a column, map it with dataset.columns (fields: {fields}).")
        fixes.append(f"To leave it out:  {override('ignore_columns', [*ignored, *names])}")
        problem = f"{self.file}: unused columns may change what the model learns: {', '.join(described)}"
        return DataError(problem, "\n".join(fixes))


#: Kind -> pattern of a short text; the first match counts.
_PATTERNS = {
    "truth": "(?i:true|false|yes|no)",
    "bit": "[01]",
    "integer": r"[+-]?\d{1,15}",
    "url": r"(?:https?|ftp|s3|gs|hf|file)://\S+|www\.\S+",
    "uuid": "[0-9a-fA-F]{8}-(?:[0-9a-fA-F]{4}-){3}[0-9a-fA-F]{12}",
    "hash": r"(?=\D*\d)(?:[0-9a-f]{16,128}|[0-9A-F]{16,128})",
    "float": r"[+-]?(?:\d+\.\d*|\.\d+|\d+)(?:[eE][+-]?\d+)?",
    "date": r"\d{4}-\d{1,2}(?:-\d{1,2}(?:[T ]\d{1,2}:\d{2}\S*(?: ?\S{1,6})?)?)?|\d{1,2}[./]\d{1,2}[./]\d{2,4}"
    r"|\d{4}/\d{1,2}/\d{1,2}",
    "word": r"[A-Z]?[^\W\d_A-Z]{1,24}|[A-Z]{1,12}",
}
_ANY_KIND = re.compile("|".join(f"(?P<{kind}>{pattern})" for kind, pattern in _PATTERNS.items()))
_LABEL_CHARACTERS, _LABEL_WORDS = 64, 6  # a longer text is a sentence, not a label
#: Scripts with few or no spaces between words (Thai, Japanese, Chinese, Korean), and the length of a label in them.
_UNSPACED = re.compile("[\u0e00-\u0e7f\u3040-\u30ff\u3400-\u9fff\uac00-\ud7af]")
_UNSPACED_CHARACTERS = 8
_TOKEN_CHARACTERS, _URL_CHARACTERS = 200, 2_000
_MAX_LEAVES = 200  # nested values with more leaves count as text


def _word_set(text: str) -> set[str]:
    return set(text.split())


_INTEGERS = {"integer", "bit"}
NUMBERS = {"float", *_INTEGERS}
_SHORT_TEXTS = {"word", "token", "label", "identifier"}
_COUNTS = _word_set("length len count counts tokens turn turns words chars characters size bytes perplexity")
#: Topics of questions; beside plain text they may be the label to learn.
_CLASSES = _word_set(
    "category categories topic topics domain domains task tasks type types subject subjects genre difficulty level tag tags "
    "keyword keywords skill skills area theme subcategory subtopic"
)
#: Words in the name of a harmless column, and the kinds of its values.
_HARMLESS = (
    (_word_set("id ids uuid guid uid idx index hash sha sha1 sha256 md5 checksum fingerprint digest rowid doi unnamed"),
     {"identifier", "token", "url", "date", *_INTEGERS}),
    (_word_set("source sources origin dataset corpus model generator engine author license licence copyright publisher "
               "site website file filename filepath path repo repository dump username annotator worker contributor provider "
               "version"),
     {*_SHORT_TEXTS, "url"}),
    (_word_set("url urls uri link links href homepage avatar thumbnail"), {"url", "token", "word", "identifier"}),
    (_word_set("lang language languages locale country script"), {"word", "token", "label"}),
    (_word_set("date time timestamp datetime year month created updated modified published retrieved crawled at utc"),
     {"date", "identifier", *NUMBERS}),
    (_word_set("meta metadata"), {*_SHORT_TEXTS, "url", "date", *NUMBERS}),
    (_CLASSES, {*_SHORT_TEXTS, *NUMBERS}),
)  # fmt: skip
#: Columns with these words in their name, such as vote_count, are harmless only as copies of a text that is read.
JUDGEMENTS = _word_set(
    "correct incorrect vote votes upvotes like likes dislikes error errors winner chosen rejected best verdict toxicity"
)
#: A path or URL in a column with these words is part of the question.
_MEDIA_WORDS = _word_set(
    "image images img imgs picture pictures photo photos screenshot screenshots video videos audio audios speech frame frames"
)
#: Columns with these words in their name are harmless only as lengths: response_tokens, but not answer_id.
_ANSWERS = _word_set(
    "answer answers label labels target targets class choice choices option options gold solution output response completion "
    "expected truth intent sentiment summary translation"
)


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
        is_nested = leaf_name != name
        # `role` and `from`: in an unused column with messages, such as a copy of the conversation
        if is_nested and (leaf_name in ("role", "from") or is_harmless(leaf_name, {kind}, has_answer=True)):
            continue
        kinds.add(kind)
        # metadata such as {label: bad} may change the meaning of a row
        if is_nested and kind != "copy" and set(words_of(leaf_name)) & (JUDGEMENTS | _ANSWERS | _MEDIA_WORDS):
            kinds.add("text")
    return kinds


def is_harmless(name: str, kinds: set[str], *, has_answer: bool) -> bool:
    """Return whether a column doesn't change the meaning of a row; plain text has no answer."""
    # a name alone proves nothing: a `source` may be where a row is from, or a sentence to translate
    name_words = set(words_of(name))
    new_kinds = kinds - {"copy"}
    if not new_kinds:
        return True
    if name_words & JUDGEMENTS:
        return False
    if name_words & _COUNTS and new_kinds <= NUMBERS:
        return True
    if name_words & (_ANSWERS | _MEDIA_WORDS) or (not has_answer and name_words & _CLASSES):
        return False
    if new_kinds <= ({"url", "identifier", "date"} if has_answer else {"url", "identifier"}):
        return True
    if any(name_words & family_words and new_kinds <= allowed for family_words, allowed in _HARMLESS):
        return True
    # web corpora have a classifier's score of the page
    return not has_answer and name.lower() in ("score", "scores", "int_score", "language_score") and new_kinds <= NUMBERS


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
    if isinstance(value, float) and not value.is_integer():
        return "float"
    if isinstance(value, (int, float)):
        return "bit" if value in (0, 1) else "integer"
    if not isinstance(value, str):
        return "date" if hasattr(value, "isoformat") else "text"
    text = value.strip()
    if len(text) > _TOKEN_CHARACTERS or "\n" in text:
        return "url" if len(text) < _URL_CHARACTERS and re.fullmatch(_PATTERNS["url"], text) else "text"
    if not text.isascii() and len(text) > _UNSPACED_CHARACTERS and _UNSPACED.search(text):
        return "text"
    if match := _ANY_KIND.fullmatch(text):
        return "identifier" if match.lastgroup in ("uuid", "hash") else str(match.lastgroup)
    if " " not in text and "\t" not in text:
        return "token"
    is_sentence = text[-1] in ".!?:;" or "?" in text or len(text) > _LABEL_CHARACTERS or len(text.split()) > _LABEL_WORDS
    return "text" if is_sentence else "label"
