"""Options of commands in texts of the engine, as the fields of the page that set them are called."""

from __future__ import annotations

import re

from ..language import mark, tr

#: The page's choices of a score -> the command's.
SCORES = {
    mark("Chosen by the answers"): "", mark("Exact match"): "exact", mark("Contains the expected answer"): "contains",
    mark("Regular expression"): "regex", mark("JSON, field by field"): "json", mark("Last number"): "numeric",
    mark("Calls of tools"): "calls", mark("Token accuracy"): "tokens", mark("Loss only, no answers"): "loss",
}  # fmt: skip
HELD_OUT_BEFORE = mark("held-out rows of the run it continued")
#: Options that a field, a choice or a button of the page stands for -> its label.
_LABELS = {
    "score": mark("Score"), "pattern": mark("Pattern"), "tolerance": mark("Tolerance"), "data": mark("Rows"),
    "forgetting": HELD_OUT_BEFORE, "last": mark("Last step, not the best"), "output": mark("Folder in the run"),
    "type": mark("Type"), "to": mark("Base and adapter in two files"), "public": mark("Public, else private"),
    "force": mark("Start anyway"),
}  # fmt: skip
_SCORE_LABELS = {value: label for label, value in SCORES.items() if value}
#: An option and its value: a number, a text in quotes, a score, a type of GGUF, or `FILE`, which stands for one.
_OPTION = re.compile(
    rf"(?<![\w-])--({'|'.join(_LABELS)})\b(?!-)(?: (FILE|'[^']*'|\d[\d.]*\d|{'|'.join(_SCORE_LABELS)}|[a-z]+\d\w*)\b)?"
)


def with_labels(text: str) -> str:
    """The text with the page's labels in place of options: `“Tolerance: 0.01”` for `--tolerance 0.01`."""
    return _OPTION.sub(lambda option: _labelled(option[1], option[2] or ""), text)


def _labelled(option: str, value: str) -> str:
    label = tr(_LABELS[option])
    if value not in ("", "FILE"):
        label = tr("{change}: {result}", change=label, result=tr(_SCORE_LABELS.get(value, value)))
    return f"“{label}”"
