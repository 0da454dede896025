"""Answers of a model as HTML: samples during training, and evaluated rows."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any

import finetune.evaluate.results as stored_results
from finetune.data.pictures.source import FileStat, file_stat, file_thumbnail
from finetune.events import Sample
from finetune.run.directory import RunDirectory

from ..language import current, mark, tr
from .markup import Safe, render

_PICTURES_PER_SAMPLE = 4
_ROWS_SHOWN = 12
_SHORT_SCORE_NAMES = {
    "exact": "EM", "contains": mark("contains"), "regex": mark("regex"), "json": "JSON", "numeric": mark("number"),
    "calls": mark("calls"), "token accuracy": mark("token accuracy"),
}  # fmt: skip
_SCORE_NAMES = {
    "exact": mark("exact match"), "regex": mark("regular expression"), "json": "JSON", "numeric": mark("number"),
    "calls": mark("tool calls"), "loss": mark("loss"),
}  # fmt: skip


def answers(
    samples: Sequence[Sample], most_prompts: int | None = None, most_steps: int = 2, *, with_pictures: bool = True
) -> str:
    """Return a table of prompts by steps, the first and the newest; empty without samples."""
    steps = sorted({sample.step for sample in samples})
    steps = steps if len(steps) <= most_steps else [steps[0], *steps[1 - most_steps :]]
    # by text and image files: rows with different images may have the same text
    by_prompt: dict[tuple[str, tuple[str, ...]], dict[int, Sample]] = {}
    for sample in samples:
        # not for a file that is passed on: a foreign run folder may name any image of this machine
        pictures = tuple(sample.pictures[:_PICTURES_PER_SAMPLE]) if with_pictures else ()
        by_prompt.setdefault((sample.prompt or "", pictures), {})[sample.step] = sample
    # samples of the newest step may have other prompts than the first
    prompts = [prompt for prompt, by_step in by_prompt.items() if steps and steps[-1] in by_step] or list(by_prompt)
    names = [tr("Step {step}", step=f"{step:,}") if step else tr("Before training") for step in steps]
    rows = []
    for text, paths in prompts[:most_prompts]:
        by_step = by_prompt[text, paths]
        expected = next((sample.expected for sample in by_step.values() if sample.expected), "")
        texts = [by_step[step].answer or "" if step in by_step else None for step in steps]
        rows.append((pictures_of(paths), text, expected, texts))
    return render("answers", steps=names, rows=rows, with_copy=with_pictures)


def pictures_of(paths: Iterable[str | Path]) -> Safe:
    """Return small copies of image files; missing images as text."""
    return render("pictures", pictures=[_small_copy(path, file_stat(path)) for path in map(Path, paths)])


@lru_cache(256)
def _small_copy(path: Path, stat: FileStat) -> dict[str, Any]:
    # cached: each tick shows the copy; `stat` differs when another file has this name
    return file_thumbnail(path)


def evaluations(
    run: RunDirectory, order: str = "differ", rows_shown: int = _ROWS_SHOWN, *, progress: Safe | None = None, empty: str,
    is_open: bool = False,
) -> str:  # fmt: skip
    """Return a run's evaluations, newest first, below `progress`."""
    stored, results = stored_results.read_evaluations(run), []
    for name in sorted(stored, key=lambda name: -_modified_s(run, name)):
        rows = stored_results.rank_rows(stored[name]["base"]["scores"], stored[name]["tuned"]["scores"], order)
        results.append((stored[name], stored_results.measures(stored[name]), rows[:rows_shown]))
    return render(
        "evaluations", progress=progress, empty=empty, is_open=is_open, damaged=stored_results.unreadable_evaluations(run),
        forgetting=stored_results.read_forgetting(run), title_of=lambda title: tr(_SCORE_NAMES.get(title) or title),
        results=results,
    )  # fmt: skip


def _modified_s(run: RunDirectory, name: str) -> float:
    return (run.path / "evaluations" / f"scores-{name}.json").stat().st_mtime


def newest_score(run: RunDirectory) -> str:
    """Return `EM 0 → 97 %`, base and tuned model of the newest evaluation; empty without an evaluation."""
    folder = run.path / "evaluations"
    try:
        return _newest_score(run, folder.stat().st_mtime_ns, current())
    except FileNotFoundError:
        return ""


@lru_cache(1024)
def _newest_score(run: RunDirectory, _changed_ns: int, _language: str) -> str:
    # cached while the folder is unchanged: the table of runs shows the score every 2 s
    results = stored_results.read_evaluations(run)
    if not results:
        return ""
    newest = results[max(results, key=lambda name: _modified_s(run, name))]
    figure = "exact_match" if newest["score"] == "exact" else "score"
    base, tuned = (newest[model].get(figure) for model in ("base", "tuned"))
    if newest["score"] not in _SHORT_SCORE_NAMES or base is None or tuned is None:
        return ""
    return f"{tr(_SHORT_SCORE_NAMES[newest['score']])} {100 * base:.3g} → {100 * tuned:.3g} %"
