"""Answers of a model as HTML: samples over its training with differences marked, scores and rows of its evaluations."""

from __future__ import annotations

import difflib
import functools
import itertools
import re
from collections.abc import Iterable, Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any

import finetune.evaluate.results as found
from finetune.data.pictures.source import FileStat, file_stat, file_thumbnail
from finetune.evaluate.paired import format_difference, rank_rows
from finetune.events import Sample
from finetune.run.directory import RunDirectory

from ..language import current, mark, tr
from .markup import Safe, inert, render

#: Text and image files: rows with different images may have the same text.
_Prompt = tuple[str, tuple[str, ...]]

_WORDS = re.compile(r"\s+|[^\s\w]|\w+")
#: Longer answers are shown without marks: difflib is quadratic.
_MOST_WORDS = 400
#: Images shown per sample.
_MOST_PICTURES = 4
_ROWS_SHOWN = 12
#: Names of scores in a list.
_SHORT = {
    "exact": "EM", "contains": mark("contains"), "regex": mark("regex"), "json": "JSON", "numeric": mark("number"),
    "calls": mark("calls"), "token accuracy": mark("token accuracy"),
}  # fmt: skip
#: Displayed names of scores.
_SCORES = {
    "exact": mark("exact match"), "regex": mark("regular expression"), "json": "JSON", "numeric": mark("number"),
    "calls": mark("tool calls"), "loss": mark("loss"),
}  # fmt: skip


def answers(
    samples: Sequence[Sample], most_prompts: int | None = None, most_steps: int = 2, *, with_pictures: bool = True
) -> str:
    """Return a table of prompts by steps, the first and the newest; empty without samples."""
    steps = sorted({sample.step for sample in samples})
    steps = steps if len(steps) <= most_steps else [steps[0], *steps[1 - most_steps :]]
    by_prompt: dict[_Prompt, dict[int, Sample]] = {}
    for sample in samples:
        # not for a file that is passed on: a foreign run folder may name any image of this machine
        pictures = tuple(sample.pictures[:_MOST_PICTURES]) if with_pictures else ()
        by_prompt.setdefault((sample.prompt or "", pictures), {})[sample.step] = sample
    prompts = [prompt for prompt, by_step in by_prompt.items() if steps and steps[-1] in by_step] or list(by_prompt)
    names = [tr("Step {step}", step=f"{step:,}") if step else tr("Before training") for step in steps]
    rows = [_row(prompt, by_prompt[prompt], steps) for prompt in prompts[:most_prompts]]
    return render("answers", steps=names, rows=rows, with_copy=with_pictures)


def pictures_of(paths: Iterable[str | Path]) -> Safe:
    """Return small copies of image files; missing images as text."""
    return render("pictures", pictures=[_small_copy(path, file_stat(path)) for path in map(Path, paths)])


@lru_cache(256)
def _small_copy(path: Path, stat: FileStat) -> dict[str, Any]:
    # cached: each tick shows the copy; `stat` differs when another file has this name
    return file_thumbnail(path)


def _row(prompt: _Prompt, by_step: dict[int, Sample], steps: Sequence[int]) -> tuple[Safe, str, str, list[Safe | None]]:
    # pictures, prompt, expected answer, and the answer of each step
    expected = next((sample.expected for sample in by_step.values() if sample.expected), "") or ""
    shown: list[Safe | None] = []
    earlier = None
    for step in steps:
        answer = (by_step[step].answer or "") if step in by_step else None
        shown.append(None if answer is None else marked(answer, expected, earlier))
        earlier = answer if answer is not None else earlier
    text, paths = prompt
    return pictures_of(paths), text, expected, shown


def marked(answer: str, expected: str, earlier: str | None) -> Safe:
    """Return `answer` with wrong words struck and newly right words marked."""
    return Safe(_marked(answer, expected, earlier) or f"<em>{tr('empty answer')}</em>")


@functools.lru_cache(1024)  # a page asks each second
def _marked(answer: str, expected: str, earlier: str | None) -> str:
    tokens, wanted = _WORDS.findall(answer), _WORDS.findall(expected)
    if not expected or max(len(tokens), len(wanted)) > _MOST_WORDS:
        return inert(answer)
    was_right = _right(_WORDS.findall(earlier), wanted) if earlier is not None else set(range(len(wanted)))
    shown = ""
    for kind, start, stop, first, end in difflib.SequenceMatcher(None, tokens, wanted, autojunk=False).get_opcodes():
        if kind == "equal":
            for is_known, indices in itertools.groupby(range(first, end), was_right.__contains__):  # one mark
                text = inert("".join(map(wanted.__getitem__, indices)))
                shown += text if is_known or text.isspace() else f"<ins>{text}</ins>"
        elif start < stop:
            shown += f"<del>{inert(''.join(tokens[start:stop]))}</del>"
    return shown


def _right(tokens: Sequence[str], wanted: Sequence[str]) -> set[int]:
    blocks = difflib.SequenceMatcher(None, tokens, wanted, autojunk=False).get_matching_blocks()
    return {block.b + number for block in blocks for number in range(block.size)}


def evaluations(
    run: RunDirectory, order: str = "differ", rows_shown: int = _ROWS_SHOWN, *, progress: Safe | None = None, empty: str,
    is_open: bool = False,
) -> str:  # fmt: skip
    """Return a run's evaluations, newest first, after the `progress` of one; `empty` if none; `is_open`: older ones too."""
    results = found.read_evaluations(run)
    shown = [results[name] for name in sorted(results, key=lambda name: -_written_s(run, name))]
    return render(
        "evaluations", progress=progress, empty=empty, is_open=is_open, damaged=found.unreadable_evaluations(run),
        no_call=found.read_no_call(run), forgetting=found.read_forgetting(run), tasks=found.read_tasks(run),
        title_of=lambda title: tr(_SCORES.get(title) or title), format_difference=format_difference, marked=marked,
        results=[
            (result, found.measures(result), rank_rows(result["base"]["scores"], result["tuned"]["scores"], order)[:rows_shown])
            for result in shown
        ],
    )  # fmt: skip


def _written_s(run: RunDirectory, name: str) -> float:
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
    # cached: lists show it again and again, and it is read anew when the folder has changed
    results = found.read_evaluations(run)
    if not results:
        return ""
    newest = results[max(results, key=lambda name: _written_s(run, name))]
    kind = "exact_match" if newest["score"] == "exact" else "score"
    base, tuned = (newest[model].get(kind) for model in ("base", "tuned"))
    if newest["score"] not in _SHORT or base is None or tuned is None:
        return ""
    return f"{tr(_SHORT[newest['score']])} {100 * base:.3g} → {100 * tuned:.3g} %"
