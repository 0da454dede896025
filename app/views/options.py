"""Command options in engine texts, as labels of the page."""

from __future__ import annotations

import re

from ..language import mark, tr

#: Scores of `finetune eval` by the page's label.
SCORES = {
    mark("Chosen by the answers"): "", mark("Exact match"): "exact", mark("Contains the expected answer"): "contains",
    mark("Regular expression"): "regex", mark("JSON, field by field"): "json", mark("Last number"): "numeric",
    mark("Calls of tools"): "calls", mark("Token accuracy"): "tokens", mark("Loss only, no answers"): "loss",
}  # fmt: skip
HELD_OUT_BEFORE = mark("held-out rows of the run it continued")
#: Page labels by option.
_LABELS = {
    "score": mark("Score"), "pattern": mark("Pattern"), "tolerance": mark("Tolerance"), "data": mark("Rows"),
    "forgetting": HELD_OUT_BEFORE, "last": mark("Last step, not the best"), "output": mark("Folder in the run"),
    "type": mark("Type"), "to": mark("Base and adapter in two files"), "public": mark("Public, else private"),
    "force": mark("Start anyway"),
}  # fmt: skip
_SCORE_LABELS = {value: label for label, value in SCORES.items() if value}
#: An option and its value: number, quoted text, score, GGUF type, or the placeholder `FILE`.
_OPTION = re.compile(
    rf"(?<![\w-])--({'|'.join(_LABELS)})\b(?!-)(?: (FILE|'[^']*'|\d[\d.]*\d|{'|'.join(_SCORE_LABELS)}|[a-z]+\d\w*)\b)?"
)


def with_labels(text: str) -> str:
    """Return the text with labels for options: `“Tolerance: 0.01”` for `--tolerance 0.01`."""
    return _OPTION.sub(lambda option: _labelled(option[1], option[2] or ""), text)


def _labelled(option: str, value: str) -> str:
    label = tr(_LABELS[option])
    if value not in ("", "FILE"):
        label = tr("{change}: {result}", change=label, result=tr(_SCORE_LABELS.get(value, value)))
    return f"“{label}”"
