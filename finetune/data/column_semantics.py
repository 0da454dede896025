"""Columns and fields that change the meaning of a row. One that isn't used stops the run until the recipe names it."""

from __future__ import annotations

import contextlib
import shlex
from collections.abc import Iterable
from typing import Any

from finetune.data.checks import SPLITS, TOKENISED, BadRow, is_blank, parse_if_text
from finetune.data.report import printable
from finetune.errors import DataError

_PREFERENCE = "which of two answers is better (for DPO)"
_LABEL = "whether an answer is good (for KTO), or a class"
_PICTURE = "pictures, and no column of them is named"
_MEDIA = "sound, video or processed pictures, and only text and pictures are trained on here"
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
    **dict.fromkeys(("image", "images", "image_url"), _PICTURE),
    **dict.fromkeys(("video", "videos", "audio", "audios", "pixel_values"), _MEDIA),
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
#: Beside plain text a score, as corpora from the web have it, doesn't change it.
_DECIDED_BY_VALUES_FOR_TEXT = (_SCORE, _CONTEXT, _REASONING)
#: Fields of a message that change its meaning.
_MESSAGE_FIELDS = {name for name, what in MEANINGS.items() if what not in (_CONTEXT, _SPLIT)}
#: What stands in a text for an image, a sound or a video.
MEDIA_TAGS = ("<image>", "<video>", "<audio>")
_MEDIA_COLUMNS = tuple(name for name, what in MEANINGS.items() if what in (_PICTURE, _MEDIA))
#: Weights that change nothing.
_NEUTRAL_WEIGHTS = (1, "1", "1.0", "true", "True")


class UnusedField(BadRow):
    """A message has a field that changes its meaning and can't be used."""

    def __init__(self, path: str, name: str) -> None:
        super().__init__(path, f"the field {printable(name)} says {MEANINGS[name.lower()]}, and it isn't used")
        self.name = name


def changes_meaning(name: Any, value: Any, format_name: str) -> bool | None:
    """Whether a column or field with this name changes the meaning of a row; None where the name doesn't decide it."""
    meaning = MEANINGS.get(name.lower()) if isinstance(name, str) else None
    if meaning is None or (format_name == "text" and meaning in _DECIDED_BY_VALUES_FOR_TEXT):
        return None
    if meaning == _SPLIT:
        return value != SPLITS[0] if isinstance(value, str) and value in SPLITS else None
    return not is_blank(value) and not (meaning == _WEIGHT and value in _NEUTRAL_WEIGHTS)


#: What to do about a column or field, by its meaning.
FIXES = {
    _PICTURE: "To train on the pictures:  dataset.columns={images: NAME}  (beside the fields that are named already)",
    _LABEL: "To learn from good and from bad answers:  method=kto\n"
    "To train on good answers only:  jq -c 'select(.[NAME] == (true, 1)) | del(.[NAME])' FILE > good.jsonl",
    _REASONING: "To train on it, write it before the answer as the model does, for example <think>...</think> and the answer; "
    "or as reasoning_content in the messages.",
    _WEIGHT: "Messages may have train: true or false, or weight: 0 or 1. Rows have no weights here: repeat or remove rows.",
    _SCORE: "Keep the rows that are good enough, then leave the score out.",
    _SPLIT: "To hold rows out:  dataset.eval_split=SPLIT  (the others are those of dataset.split, train)",
    _TOOLS: "Tools are a column `tools` beside messages or conversations; calls are `tool_calls` of an assistant's message.",
}


def check_message(message: dict[str, Any], path: str, used_fields: Iterable[str]) -> None:
    """Raises UnusedField for a field of a message that changes its meaning and isn't in `used_fields`."""
    for name, value in message.items():
        if isinstance(name, str) and name.lower() in _MESSAGE_FIELDS and name not in used_fields and not is_blank(value):
            raise UnusedField(path, name)


def check_placeholders(row: dict[str, Any], texts: Iterable[str]) -> None:
    """Raises BadRow when a text has a tag for an image, sound or video of the row, which is left out."""
    tags = (tag for text in texts for tag in MEDIA_TAGS if tag in text)
    if any(not is_blank(row.get(name)) for name in _MEDIA_COLUMNS) and (tag := next(tags, None)):
        raise BadRow(None, f"has {tag} in its text, in the place of what is left out")


def without_columns(row: dict[str, Any], ignored: Iterable[str]) -> dict[str, Any]:
    """The row without the ignored columns, and its messages without the ignored fields."""
    ignored_names = set(ignored)
    if not ignored_names:
        return row
    return {name: _without_fields(value, ignored_names) for name, value in row.items() if name not in ignored_names}


#: Fields without which a message is none: a column of such a name may be left out, they stay.
_MESSAGE_PARTS = {"role", "content", "from", "value"}


def _without_fields(value: Any, ignored: set[str]) -> Any:
    if isinstance(value, str) and value.lstrip().startswith("[") and any(name in value for name in ignored):
        with contextlib.suppress(BadRow):  # it is plain text
            value = parse_if_text(value, "")
    if not isinstance(value, list):
        return value
    dropped = ignored - _MESSAGE_PARTS
    return [{k: v for k, v in item.items() if k not in dropped} if isinstance(item, dict) else item for item in value]


class PreferenceData(DataError):
    """Rows with a better and a worse answer, in the columns `chosen` and `rejected`."""

    def __init__(self, file: str, chosen: str, rejected: str) -> None:
        super().__init__(
            f"{file}: this is preference data ({chosen}/{rejected}), for DPO; method sft trains on one answer to a prompt",
            "To learn to prefer the chosen answers:  method=dpo",
        )
        self.chosen, self.rejected = chosen, rejected


def check_other_data(rows: list[dict[str, Any]], file: str, mapped_columns: Iterable[str]) -> None:
    """Raise DataError that names the kind of data if it isn't rows with answers. `mapped_columns`: named by the recipe."""
    filled_columns = {name for row in rows for name, value in row.items() if not is_blank(value)} - set(mapped_columns)
    for columns, (problem, fix) in _NOT_TRAINING_DATA.items():
        if filled_columns.issuperset(columns):
            raise DataError(f"{file}: {problem}", fix.replace("FILE", shlex.quote(file)))
    for chosen, rejected in (("chosen", "rejected"), ("chosen_response", "rejected_response"), ("response_j", "response_k")):
        if filled_columns.issuperset((chosen, rejected)):
            raise PreferenceData(file, chosen, rejected)


_NOT_TRAINING_DATA: dict[tuple[str, ...], tuple[str, str]] = {
    ("turns", "category"): (
        "this is a list of questions to evaluate with (MT-Bench: turns, category); it has no answers to train on",
        "Name a file with answers as dataset.path.",
    ),
    ("instruction", "instances"): (
        "these are seed tasks (self-instruct: instruction, instances); the answers are inside instances",
        "Make a row for each:  jq -c '.instruction as $i | .instances[] | {instruction: $i, input, output}' FILE > rows.jsonl",
    ),
    ("input_ids",): TOKENISED,
}
