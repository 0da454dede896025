"""Newest evaluation of each run, for lists."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from finetune.evaluate.results import read_evaluations
from finetune.run.directory import RunDirectory

from .language import current, mark, tr

#: Names of scores in a list.
_SCORES = {
    "exact": "EM", "contains": mark("contains"), "regex": mark("regex"), "json": "JSON", "numeric": mark("number"),
    "calls": mark("calls"), "token accuracy": mark("token accuracy"),
}  # fmt: skip


class Scores:
    """Newest evaluation of each run as text, by language."""

    def __init__(self) -> None:
        self._texts: dict[tuple[Path, str], tuple[int, str]] = {}

    def of(self, run: RunDirectory) -> str:
        """Return `EM 0 → 97 %`, base and tuned model; empty without an evaluation."""
        folder = run.path / "evaluations"
        try:
            stamp = folder.stat().st_mtime_ns
        except FileNotFoundError:
            return ""
        key = (folder, current())
        # read again when the folder has changed
        if self._texts.get(key, (0, ""))[0] != stamp:
            self._texts[key] = (stamp, _score(run))
        return self._texts[key][1]


def _score(run: RunDirectory) -> str:
    results = read_evaluations(run)
    if not results:
        return ""
    folder = run.path / "evaluations"
    newest = results[max(results, key=lambda name: (folder / f"scores-{name}.json").stat().st_mtime)]
    base, tuned = (_share(newest, model) for model in ("base", "tuned"))
    return f"{tr(_SCORES[newest['score']])} {base} → {tuned} %" if newest["score"] in _SCORES and base and tuned else ""


def _share(result: dict[str, Any], model: str) -> str:
    score = result[model].get("score")
    share = result[model].get("exact_match") if score is None or result["score"] == "exact" else score
    return "" if share is None else f"{100 * share:.3g}"
