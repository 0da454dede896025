"""Columns and fields that change what a row means. One that isn't used stops the run until the recipe names it."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from finetune.data.checks import SPLITS, BadRow, is_missing, parsed_if_text
from finetune.data.report import shown
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

#: Name of a column, in lower case -> what it says. Names that are read are not looked up.
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
_NOT_OF_TEXT = (_SCORE, _CONTEXT, _REASONING)
#: What a message may say that isn't in its text.
_OF_MESSAGES = {name for name, what in MEANINGS.items() if what not in (_CONTEXT, _SPLIT)}
_PLACEHOLDERS = ("<image>", "<video>", "<audio>")
_MEDIA_COLUMNS = tuple(name for name, what in MEANINGS.items() if what == _MEDIA)
#: Weights that say nothing.
_WHOLE = (1, "1", "1.0", "true", "True")


class UnusedField(BadRow):
    """A message has a field that changes its meaning and can't be used."""

    def __init__(self, where: str, name: str) -> None:
        super().__init__(where, f"the field {shown(name)} says {MEANINGS[name.lower()]}, and it isn't used")
        self.name = name


class Unused:
    """Counts rows with columns or message fields that change the meaning and aren't used."""

    def __init__(self, file: str, name: str, read: Iterable[str]) -> None:
        self._file, self._format, self._read = file, name, set(read)
        self.rows: dict[str, list[int]] = {}

    def see(self, row: dict[str, Any], number: int) -> None:
        """Count the unused columns of a row that is read in this format, after renaming."""
        for column, value in row.items():
            if column not in self._read and self._matters(column, value):
                self.rows.setdefault(column, []).append(number)

    def field(self, name: str, number: int) -> None:
        """Count an unused field of a message."""
        self.rows.setdefault(name, []).append(number)

    def add(self, rows: dict[str, list[int]]) -> None:
        """Count those of other rows."""
        for name, numbers in rows.items():
            self.rows.setdefault(name, []).extend(numbers)

    def _matters(self, column: str, value: Any) -> bool:
        what = MEANINGS.get(column.lower()) if isinstance(column, str) else None
        if what is None or (self._format == "text" and what in _NOT_OF_TEXT):
            return False
        if what == _SPLIT:
            return value in SPLITS and value != SPLITS[0]
        return not _says_nothing(value) and not (what == _WEIGHT and value in _WHOLE)

    @property
    def is_refused(self) -> bool:
        """Whether `refuse` will raise, whatever follows."""
        return stop(self.rows)

    def refuse(self, read: int) -> None:
        """Raise DataError that names each of them, with what can be done. `read`: all rows; all of one split is no mixture."""
        if len(self.rows.get("split", ())) == read:
            self.rows.pop("split", None)
        if not self.rows:
            return
        problems = []
        for column, rows in self.rows.items():
            first = ", ".join(map(str, rows[:3])) + (", ..." if len(rows) > 3 else "")
            problems.append(
                f"{self._file}: '{shown(column)}' isn't used, and it says {MEANINGS[column.lower()]}: "
                f"{len(rows):,} row(s), the first {first}"
            )
        names = ", ".join(shown(column) for column in self.rows)
        ways = [_WAYS[what] for what in dict.fromkeys(MEANINGS[column.lower()] for column in self.rows) if what in _WAYS]
        raise DataError(problems, "\n".join([*ways, f"To leave it out on purpose:  dataset.ignore_columns=[{names}]"]))


def stop(rows: Iterable[str]) -> bool:
    """Whether these unused columns stop a run whatever follows. Of `split` it takes two values, which may be far apart."""
    return bool(set(rows) - {"split"})


_WAYS = {
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


def check_message(item: dict[str, Any], where: str, read: Iterable[str]) -> None:
    """Raises UnusedField for a field of a message that changes its meaning and isn't in `read`."""
    for name, value in item.items():
        if isinstance(name, str) and name.lower() in _OF_MESSAGES and name not in read and not _says_nothing(value):
            raise UnusedField(where, name)


def check_placeholders(row: dict[str, Any], texts: Iterable[str]) -> None:
    """Raises BadRow when a text stands for an image, sound or video that the row has and that is left out."""
    if not any(not _says_nothing(row.get(name)) for name in _MEDIA_COLUMNS):
        return
    for text in texts:
        if found := next((mark for mark in _PLACEHOLDERS if mark in text), None):
            raise BadRow(None, f"has {found} in its text, in the place of what is left out")


def without(row: dict[str, Any], ignored: Iterable[str]) -> dict[str, Any]:
    """The row without the ignored columns, and its messages without the ignored fields."""
    names = set(ignored)
    if not names:
        return row
    return {name: _stripped(value, names) for name, value in row.items() if name not in names}


def _stripped(value: Any, names: set[str]) -> Any:
    if isinstance(value, str) and value.lstrip().startswith("[") and any(name in value for name in names):
        value = parsed_if_text(value, "") if _is_json(value) else value
    if isinstance(value, list) and any(isinstance(item, dict) for item in value):
        return [{k: v for k, v in item.items() if k not in names} if isinstance(item, dict) else item for item in value]
    return value


def _is_json(text: str) -> bool:
    try:
        parsed_if_text(text, "")
    except BadRow:
        return False
    return True


def recognise(rows: list[dict[str, Any]], file: str, named: Iterable[str]) -> None:
    """Raise DataError for data that isn't rows with answers, and say what it is. `named`: columns that the recipe names."""
    free = {name for row in rows for name, value in row.items() if not _says_nothing(value)} - set(named)
    for columns, kind in _KINDS.items():
        if free.issuperset(columns):
            raise DataError(f"{file}: {kind[0]}", kind[1])
    for chosen, rejected in (("chosen", "rejected"), ("chosen_response", "rejected_response"), ("response_j", "response_k")):
        if free.issuperset((chosen, rejected)):
            first = next(row for row in rows if not _says_nothing(row.get(chosen)))
            raise DataError(
                f"{file}: this is preference data ({chosen}/{rejected}), for DPO; finetune trains on one answer to a prompt",
                f"To train on the chosen answers, in the recipe:\n  {_chosen_alone(first, chosen, rejected)}",
            )


_KINDS: dict[tuple[str, ...], tuple[str, str]] = {
    ("turns", "category"): (
        "this is a list of questions to evaluate with (MT-Bench: turns, category); it has no answers to train on",
        "Name a file with answers as dataset.path.",
    ),
    ("instruction", "instances"): (
        "these are seed tasks (self-instruct: instruction, instances); the answers are inside instances",
        "Make a row for each:  jq -c '.instruction as $i | .instances[] | {instruction: $i, input, output}' FILE > rows.jsonl",
    ),
}


def _chosen_alone(row: dict[str, Any], chosen: str, rejected: str) -> str:
    """The `dataset:` that trains on the chosen answers of rows like this."""
    answer, ignored = row[chosen], [rejected]
    if isinstance(answer, list) and any(isinstance(turn, dict) and _role(turn) in ("user", "human") for turn in answer):
        columns = {"messages": chosen}
        name = "messages"
    else:
        name, prompt = _prompt_of(row)
        if name == "prompt_completion":
            columns = {"completion": chosen} if prompt == "prompt" else {"prompt": prompt, "completion": chosen}
        else:
            columns = {"output": chosen} if prompt == "instruction" else {"instruction": prompt, "output": chosen}
    ignored += [column for column in row if column.lower() in MEANINGS and column not in (chosen, rejected, *_READ_BY[name])]
    mapping = ", ".join(f"{field}: {column}" for field, column in columns.items())
    return f"dataset: {{path: ..., format: {name}, columns: {{{mapping}}}, ignore_columns: [{', '.join(ignored)}]}}"


_READ_BY = {"messages": ("tools", "system"), "prompt_completion": ("tools",), "alpaca": ("input", "system", "history")}


def _prompt_of(row: dict[str, Any]) -> tuple[str, str]:
    """The format for a prompt beside a chosen answer, and its column."""
    for column in ("conversations", "messages", "prompt", "instruction", "question", "query"):
        value = row.get(column)
        if isinstance(value, list):
            return "prompt_completion", column
        if isinstance(value, str) and value.strip():
            return "alpaca", column
    return "alpaca", "instruction"


def _role(turn: dict[str, Any]) -> Any:
    return turn.get("role", turn.get("from"))


def _says_nothing(value: Any) -> bool:
    return (
        is_missing(value)
        or (isinstance(value, (str, list, dict, tuple)) and len(value) == 0)
        or (isinstance(value, str) and value.strip() in ("", "[]", "{}", "null", "None"))
    )
