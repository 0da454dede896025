"""Columns and fields that change the meaning of a row. One that isn't used stops the run until the recipe names it."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from finetune.data.checks import SPLITS, BadRow, is_missing, parse_if_text
from finetune.data.report import printable
from finetune.errors import DataError

_PREFERENCE = "which of two answers is better (for DPO)"
_LABEL = "whether an answer is good (for KTO), or a class"
_MEDIA = "images, sound or video, and only text is trained on here"
_REASONING = "the reasoning before an answer"
_WEIGHT = "how much a row or message counts"
_SCORE = "how good an answer is"
_CONTEXT = "a part of the prompt"
_TOOLS = "tools or calls of them"
_SPLIT = "which rows are held out"

#: Column name in lower case -> what its values mean. Columns that the format reads are not looked up.
MEANINGS: dict[str, str] = {
    **dict.fromkeys(("chosen", "rejected", "chosen_response", "rejected_response", "response_j", "response_k"), _PREFERENCE),
    **dict.fromkeys(("label", "labels", "kto_tag"), _LABEL),
    **dict.fromkeys(("image", "images", "video", "videos", "audio", "audios", "image_url", "pixel_values"), _MEDIA),
    **dict.fromkeys(
        ("reasoning_content", "reasoning", "thinking", "thought", "thoughts", "cot", "complex_cot", "chain_of_thought",
         "rationale"), _REASONING,
    ),
    **dict.fromkeys(
        ("weight", "weights", "sample_weight", "train", "trainable", "training", "loss", "loss_mask", "mask", "train_detail"),
        _WEIGHT,
    ),
    **dict.fromkeys(("score", "scores", "rating", "ratings", "reward", "rewards", "score_chosen", "score_rejected"), _SCORE),
    **dict.fromkeys(("system", "system_prompt", "context", "input", "history", "documents"), _CONTEXT),
    **dict.fromkeys(("tools", "functions", "tool_calls", "function_call", "function_calls"), _TOOLS),
    "split": _SPLIT,
}  # fmt: skip
#: Scores, weights and reasoning beside plain text, as corpora from the web have, don't change it.
_IRRELEVANT_FOR_TEXT = (_SCORE, _CONTEXT, _REASONING)
#: Fields of a message that change its meaning.
_MESSAGE_FIELDS = {name for name, what in MEANINGS.items() if what not in (_CONTEXT, _SPLIT)}
_PLACEHOLDERS = ("<image>", "<video>", "<audio>")
_MEDIA_COLUMNS = tuple(name for name, what in MEANINGS.items() if what == _MEDIA)
#: Weights that change nothing.
_NEUTRAL_WEIGHTS = (1, "1", "1.0", "true", "True")


class UnusedField(BadRow):
    """A message has a field that changes its meaning and can't be used."""

    def __init__(self, path: str, name: str) -> None:
        super().__init__(path, f"the field {printable(name)} says {MEANINGS[name.lower()]}, and it isn't used")
        self.name = name


class UnusedColumns:
    """Collects the numbers of rows with columns or message fields that change the meaning and aren't used."""

    def __init__(self, file: str, format_name: str, used_columns: Iterable[str]) -> None:
        self._file, self._format, self._used = file, format_name, set(used_columns)
        self.rows_by_name: dict[str, list[int]] = {}

    def add_row(self, row: dict[str, Any], number: int) -> None:
        """Add the unused columns of a row of this format, after renaming."""
        for column, value in row.items():
            if column not in self._used and self._changes_meaning(column, value):
                self.rows_by_name.setdefault(column, []).append(number)

    def add_field(self, name: str, number: int) -> None:
        """Add an unused field of a message."""
        self.rows_by_name.setdefault(name, []).append(number)

    def merge(self, rows_by_name: dict[str, list[int]]) -> None:
        """Add those of other rows."""
        for name, numbers in rows_by_name.items():
            self.rows_by_name.setdefault(name, []).extend(numbers)

    def _changes_meaning(self, column: str, value: Any) -> bool:
        meaning = MEANINGS.get(column.lower()) if isinstance(column, str) else None
        if meaning is None or (self._format == "text" and meaning in _IRRELEVANT_FOR_TEXT):
            return False
        if meaning == _SPLIT:
            return value in SPLITS and value != SPLITS[0]
        return not _is_blank(value) and not (meaning == _WEIGHT and value in _NEUTRAL_WEIGHTS)

    @property
    def stops_run(self) -> bool:
        """Whether `raise_if_any` will raise, whatever rows follow."""
        return blocks_run(self.rows_by_name)

    def raise_if_any(self, rows_read: int) -> None:
        """Raise DataError that names each column and a fix. A `split` in all `rows_read` rows is no mixture."""
        if len(self.rows_by_name.get("split", ())) == rows_read:
            self.rows_by_name.pop("split", None)
        if not self.rows_by_name:
            return
        problems = []
        for column, numbers in self.rows_by_name.items():
            first_rows = ", ".join(map(str, numbers[:3])) + (", ..." if len(numbers) > 3 else "")
            problems.append(
                f"{self._file}: '{printable(column)}' isn't used, and it says {MEANINGS[column.lower()]}: "
                f"{len(numbers):,} row(s), the first {first_rows}"
            )
        names = ", ".join(printable(column) for column in self.rows_by_name)
        meanings = dict.fromkeys(MEANINGS[column.lower()] for column in self.rows_by_name)
        fixes = [_FIXES[meaning] for meaning in meanings if meaning in _FIXES]
        raise DataError(problems, "\n".join([*fixes, f"To leave it out on purpose:  dataset.ignore_columns=[{names}]"]))


def blocks_run(unused: Iterable[str]) -> bool:
    """Whether these unused columns stop a run whatever rows follow; `split` alone does if a later row has another value."""
    return bool(set(unused) - {"split"})


_FIXES = {
    _LABEL: "To train on good answers only, keep those rows:  jq -c 'select(.label)' FILE > good.jsonl",
    _CONTEXT: "To use it, name the field it is, for example  dataset.columns={input: context}  (fields of alpaca: instruction, "
    "input, output, system, history)",
    _REASONING: "To train on it, write it before the answer as the model does, for example <think>...</think> and the answer; "
    "or as reasoning_content in the messages.",
    _WEIGHT: "Messages may have train: true or false, or weight: 0 or 1. Rows have no weights here: repeat or remove rows.",
    _SCORE: "Keep the rows that are good enough, then leave the score out.",
    _SPLIT: "To hold rows out:  dataset.eval_split=test  (the others are those of dataset.split, train)",
    _TOOLS: "Tools are a column `tools` beside messages or conversations; calls are `tool_calls` of an assistant's message.",
}


def check_message(message: dict[str, Any], path: str, used_fields: Iterable[str]) -> None:
    """Raises UnusedField for a field of a message that changes its meaning and isn't in `used_fields`."""
    for name, value in message.items():
        if isinstance(name, str) and name.lower() in _MESSAGE_FIELDS and name not in used_fields and not _is_blank(value):
            raise UnusedField(path, name)


def check_placeholders(row: dict[str, Any], texts: Iterable[str]) -> None:
    """Raises BadRow when a text has a tag for an image, sound or video of the row, which is left out."""
    if not any(not _is_blank(row.get(name)) for name in _MEDIA_COLUMNS):
        return
    for text in texts:
        if placeholder := next((tag for tag in _PLACEHOLDERS if tag in text), None):
            raise BadRow(None, f"has {placeholder} in its text, in the place of what is left out")


def without_columns(row: dict[str, Any], ignored: Iterable[str]) -> dict[str, Any]:
    """The row without the ignored columns, and its messages without the ignored fields."""
    ignored_names = set(ignored)
    if not ignored_names:
        return row
    return {name: _without_fields(value, ignored_names) for name, value in row.items() if name not in ignored_names}


def _without_fields(value: Any, ignored: set[str]) -> Any:
    if isinstance(value, str) and value.lstrip().startswith("[") and any(name in value for name in ignored):
        value = parse_if_text(value, "") if _is_json(value) else value
    if isinstance(value, list) and any(isinstance(item, dict) for item in value):
        return [{k: v for k, v in item.items() if k not in ignored} if isinstance(item, dict) else item for item in value]
    return value


def _is_json(text: str) -> bool:
    try:
        parse_if_text(text, "")
    except BadRow:
        return False
    return True


def refuse_other_data(rows: list[dict[str, Any]], file: str, mapped_columns: Iterable[str]) -> None:
    """Raise DataError that names the kind of data if it isn't rows with answers. `mapped_columns`: named by the recipe."""
    filled_columns = {name for row in rows for name, value in row.items() if not _is_blank(value)} - set(mapped_columns)
    for columns, (problem, fix) in _NOT_TRAINING_DATA.items():
        if filled_columns.issuperset(columns):
            raise DataError(f"{file}: {problem}", fix)
    for chosen, rejected in (("chosen", "rejected"), ("chosen_response", "rejected_response"), ("response_j", "response_k")):
        if filled_columns.issuperset((chosen, rejected)):
            first_row = next(row for row in rows if not _is_blank(row.get(chosen)))
            named = "" if chosen == "chosen" else f"  dataset.columns={{chosen: {chosen}, rejected: {rejected}}}"
            raise DataError(
                f"{file}: this is preference data ({chosen}/{rejected}), for DPO; method sft trains on one answer to a prompt",
                f"To learn to prefer the chosen answers:  method=dpo{named}\n"
                f"To train on the chosen answers, in the recipe:\n  {_dataset_of_chosen(first_row, chosen, rejected)}",
            )


_NOT_TRAINING_DATA: dict[tuple[str, ...], tuple[str, str]] = {
    ("turns", "category"): (
        "this is a list of questions to evaluate with (MT-Bench: turns, category); it has no answers to train on",
        "Name a file with answers as dataset.path.",
    ),
    ("instruction", "instances"): (
        "these are seed tasks (self-instruct: instruction, instances); the answers are inside instances",
        "Make a row for each:  jq -c '.instruction as $i | .instances[] | {instruction: $i, input, output}' FILE > rows.jsonl",
    ),
}


def _dataset_of_chosen(row: dict[str, Any], chosen: str, rejected: str) -> str:
    """The `dataset:` setting that trains on the chosen answers of such rows."""
    answer, ignored = row[chosen], [rejected]
    if isinstance(answer, list) and any(isinstance(turn, dict) and _role(turn) in ("user", "human") for turn in answer):
        columns = {"messages": chosen}
        format_name = "messages"
    else:
        format_name, prompt_column = _format_and_prompt(row)
        if format_name == "prompt_completion":
            columns = {"completion": chosen} if prompt_column == "prompt" else {"prompt": prompt_column, "completion": chosen}
        else:
            columns = {"output": chosen} if prompt_column == "instruction" else {"instruction": prompt_column, "output": chosen}
    used = (chosen, rejected, *_OPTIONAL_COLUMNS[format_name])
    ignored += [column for column in row if column.lower() in MEANINGS and column not in used]
    mapping = ", ".join(f"{field}: {column}" for field, column in columns.items())
    return f"dataset: {{path: ..., format: {format_name}, columns: {{{mapping}}}, ignore_columns: [{', '.join(ignored)}]}}"


_OPTIONAL_COLUMNS = {"messages": ("tools", "system"), "prompt_completion": ("tools",), "alpaca": ("input", "system", "history")}


def _format_and_prompt(row: dict[str, Any]) -> tuple[str, str]:
    """The format of a row with a prompt and a chosen answer, and the prompt's column."""
    for column in ("conversations", "messages", "prompt", "instruction", "question", "query"):
        value = row.get(column)
        if isinstance(value, list):
            return "prompt_completion", column
        if isinstance(value, str) and value.strip():
            return "alpaca", column
    return "alpaca", "instruction"


def _role(turn: dict[str, Any]) -> Any:
    return turn.get("role", turn.get("from"))


def _is_blank(value: Any) -> bool:
    return (
        is_missing(value)
        or (isinstance(value, (str, list, dict, tuple)) and len(value) == 0)
        or (isinstance(value, str) and value.strip() in ("", "[]", "{}", "null", "None"))
    )
