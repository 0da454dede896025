"""The planner process: reads questions as lines of JSON, answers with lines of JSON.

look    {"recipe": yaml}                                  what is in the data: report, lengths, and the first row marked
row     {"recipe": yaml, "index": n}                      one row as the model sees it, from 0
plan    {"recipe": yaml, "free_bytes": n or null,         the plan with its forecast, for the tokenised data;
         "compare": bool}                                 `compare` adds forecasts of the alternatives
largest {"recipe": yaml, "setting": name}                 the largest value of a setting with which the recipe fits
badges  {"recipe": yaml, "models": [id, ...]}             whether each of these models fits with this recipe
newest  {"number": n}                                     no answer; ends the work on a plan, or largest, with a lower number

Before an answer there may be lines {"progress": message}.
"""

from __future__ import annotations

import dataclasses
import functools
import json
import os
import queue
import select
import signal
import sys
import threading
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from finetune.card.visible import hide_gpus
from finetune.errors import FinetuneError
from finetune.gc_settings import raise_gc_thresholds
from finetune.planner.plan import Plan, Verdict
from finetune.privacy import keep_private
from finetune.recipe import parse_recipe
from finetune.settings import Recipe, Settings
from finetune.settings.base_formats import base_format_of
from finetune.settings.schema import Decides, settings_that_decide

from ..process import redirect_stdout
from ..views.words import plan_in_languages
from .planner import SupersededError
from .prefetch import PlanPrefetcher
from .what_if import Outcome, Outcomes, outcome_of

if TYPE_CHECKING:
    from finetune.data.preparation import EncodedRows, PreparedData
    from finetune.planner.planning import RowsRead

_DATASETS, _LIMITS, _LENGTHS_SENT = 2, 64, 20_000
#: Nothing is planned ahead while questions follow each other faster than this, as when a slider is moved: forks take time.
_PAUSE_S = 0.5
#: How often a fork's parent looks whether a newer question was asked.
_LOOK_S = 0.01
#: Settings that are applied to rows that are tokenised already.
_APPLIED_AFTERWARDS = ("max_length", "excess_length")


class Questions:
    """Answers, with the data of the last few recipes in memory."""

    def __init__(self, report: Callable[[str], None] = lambda _: None, newest: Callable[[], int] = lambda: 0) -> None:
        """`report` receives progress messages; `newest` gives the number of the newest question for a plan."""
        self._report, self._newest = report, newest
        self._encoded: OrderedDict[str, EncodedRows] = OrderedDict()
        self._read: OrderedDict[str, RowsRead] = OrderedDict()
        self._selected: tuple[str, PreparedData] | None = None

    def answer(self, question: dict[str, Any]) -> dict[str, Any]:
        """The answer to one question; errors are answers, too."""
        try:
            recipe = parse_recipe(question["recipe"], "recipe")
            kind = question["kind"]
            if kind == "look":
                return self._described(recipe)
            if kind == "row":
                return self._marked(recipe, question["index"])
            if kind == "plan":
                free_bytes, compare = question.get("free_bytes"), question.get("compare", False)
                progress = functools.partial(self._report_plan, question.get("number", 0))
                return {"plan": self.plan(recipe, progress, free_bytes=free_bytes, compare=compare).as_json()}
            if kind == "largest":
                return {"largest": self._largest(recipe, question["setting"], question.get("number", 0))}
            return {"badges": {name: _badge(recipe, name) for name in question["models"]}}
        except FinetuneError as error:
            return {**error.as_json(), "title": error.title}
        except SupersededError:
            return {"superseded": True}
        except Exception as error:  # noqa: BLE001 - the page shows it, and the process answers the next question
            import traceback

            traceback.print_exc()
            return {"title": "Internal error", "problems": [f"{type(error).__name__}: {error}"], "fix": "", "exit_code": 1}

    def answer_silently(self, question: dict[str, Any]) -> dict[str, Any]:
        """The answer to a question in a fork, which has no standard output to report progress to."""
        self._report = lambda _: None
        return self.answer(question)

    def _described(self, recipe: Recipe) -> dict[str, Any]:
        """Report, lengths and the first row. Refused rows are listed, not raised; a run still refuses them."""
        prepared = self._prepared(recipe)
        lengths = sorted(prepared.lengths)
        sent = lengths if len(lengths) <= _LENGTHS_SENT else lengths[:: len(lengths) // _LENGTHS_SENT + 1] + lengths[-1:]
        return {
            "report": prepared.report.as_json(),
            "kinds": [row.kind for row in prepared.report.rows_refused],
            "eval_report": prepared.eval_report.as_json() if prepared.eval_report else None,
            "lengths": sent,
            **self._marked(recipe, 0),
        }

    def _marked(self, recipe: Recipe, index: int) -> dict[str, Any]:
        from finetune.data.pictures.display import small_pictures, with_counts
        from finetune.data.tokens import NOT_TRAINED
        from finetune.data.trained_spans import example_spans

        prepared = self._prepared(recipe)
        count = len(prepared.lengths)
        index = max(0, min(index, count - 1))
        spans = example_spans(prepared, self._encode(recipe, self._report).encoder.tokenizer, index)
        ids, labels = prepared.sequence(index) if count else ([], [])
        return {
            "marked": [[with_counts(text), bool(trained)] for text, trained in spans], "index": index, "sequences": count,
            "tokens": len(ids), "trained_tokens": sum(label != NOT_TRAINED for label in labels),
            "pictures": small_pictures(prepared.pictures(index)) if count else [],
        }  # fmt: skip

    def _prepared(self, recipe: Recipe) -> PreparedData:
        """The rows as they are trained on; those of the last recipe stay, as one walks through them."""
        key = f"{_data_key(recipe)} {recipe.max_length} {recipe.excess_length}"
        if self._selected is None or self._selected[0] != key:
            self._selected = key, self._encode(recipe, self._report).select(recipe, None).prepared()
        return self._selected[1]

    def _report_plan(self, number: int, message: str) -> None:
        """Report progress of a plan. Raises SupersededError when a newer one was asked for."""
        if number < self._newest():
            raise SupersededError
        self._report(message)

    def plan(
        self,
        recipe: Recipe,
        progress: Callable[[str], None] | None = None,
        *,
        free_bytes: int | None = None,
        compare: bool = False,
    ) -> Plan:
        """The plan of a recipe; `progress` may raise to cancel it."""
        from finetune.card import find_card
        from finetune.planner.planning import plan_recipe

        card = find_card(recipe.gpu, free_bytes=free_bytes, processes=recipe.launch.processes_here)
        rows = functools.partial(self._rows, report=progress or self._report)
        return plan_recipe(recipe, card, rows, progress=progress, compare=compare)

    def _largest(self, recipe: Recipe, setting: str, number: int) -> dict[str, Any]:
        from finetune.card import find_card
        from finetune.planner.largest import plan_largest

        card = find_card(recipe.gpu, processes=recipe.launch.processes_here)
        progress = functools.partial(self._report_plan, number)
        largest = plan_largest(recipe, card, functools.partial(self._rows, report=progress), setting, progress=progress)
        return largest.as_json()

    def _rows(self, recipe: Recipe, report: Callable[[str], None]) -> RowsRead:
        """The rows under the recipe's limit of length; a slider asks again and again."""
        from finetune.planner.planning import read_rows

        key = _data_key(recipe)
        limited = f"{key} {recipe.max_length} {recipe.excess_length}"
        if limited in self._read:
            return self._read[limited]
        read = read_rows(recipe, functools.partial(self._encode, report=report), downloaded=key in self._encoded)
        if key in self._encoded:
            self._read[limited] = read
            while len(self._read) > _LIMITS:
                self._read.popitem(last=False)
        return read

    def _encode(self, recipe: Recipe, report: Callable[[str], None]) -> EncodedRows:
        from finetune.planner.planning import encode_rows

        key = _data_key(recipe)
        if key not in self._encoded:
            self._encoded[key] = encode_rows(recipe, report)
            while len(self._encoded) > _DATASETS:
                self._encoded.popitem(last=False)
        self._encoded.move_to_end(key)
        return self._encoded[key]


def _data_key(recipe: Recipe) -> str:
    """Everything that the rows' tokens depend on before the limit of length."""
    chosen = recipe.model_dump(mode="json")
    return json.dumps([chosen[name] for name in settings_that_decide(Decides.TOKENS) if name not in _APPLIED_AFTERWARDS])


def _badge(recipe: Recipe, name: str) -> dict[str, Any]:
    """Verdict and size of this model with the recipe's data, card and max_length; other settings are the planner's."""
    from finetune.card import find_card
    from finetune.model.configuration import read_config
    from finetune.planner.planning import plan_recipe, without_rows
    from finetune.planner.shape import shape_of

    inherited: dict[str, Any] = {name: getattr(recipe, name) for name in ("dataset", "gpu", "max_length")}
    try:
        plan = plan_recipe(Recipe(**inherited, model_name_or_path=name), find_card(recipe.gpu), without_rows)
        parameters = shape_of(read_config(plan.settings), plan.settings).parameters
    except FinetuneError as error:
        return {"verdict": Verdict.UNKNOWN, "because": error.problems[0]}
    peak, base = plan.forecast.peak_bytes if plan.forecast else None, base_format_of(plan.settings)
    return {"verdict": plan.verdict, "peak_bytes": peak, "bits": base.bits if base.setting else None, "parameters": parameters}


class Inbox:
    """Questions in their order, read by a thread, so that an answer in the making can see that a newer one was asked for."""

    def __init__(self, lines: Iterable[str]) -> None:
        self._questions: queue.SimpleQueue[dict[str, Any] | None] = queue.SimpleQueue()
        #: Number of the newest question for a plan.
        self.newest = 0
        threading.Thread(target=self._read, args=(lines,), daemon=True).start()

    def _read(self, lines: Iterable[str]) -> None:
        for line in lines:
            message = json.loads(line)
            if message["kind"] == "newest":
                self.newest = max(self.newest, message["number"])
            else:
                self._questions.put(message)
        self._questions.put(None)

    def __iter__(self) -> Iterator[dict[str, Any] | None]:
        """Questions, and None when there was none for a while after one."""
        wait_s: float | None = None
        while True:
            try:
                question = self._questions.get(timeout=wait_s)
            except queue.Empty:
                wait_s = None
                yield None
                continue
            if question is None:
                return
            yield question
            wait_s = _PAUSE_S


def _answer(questions: Questions, inbox: Inbox, question: dict[str, Any], leave: tuple[int, ...]) -> dict[str, Any]:
    """The answer; forecasts of other plans take seconds and are made in a fork, which a newer question ends at once."""
    if question.get("compare") and hasattr(os, "fork"):
        answer = functools.partial(questions.answer_silently, question)
        return _answer_in_fork(answer, lambda: question["number"] < inbox.newest, leave)
    return questions.answer(question)


def _answer_in_fork(
    make_answer: Callable[[], dict[str, Any]], is_superseded: Callable[[], bool], leave: tuple[int, ...]
) -> dict[str, Any]:
    """What `make_answer` returns, as JSON has it; {"superseded": True} as soon as `is_superseded` says so; empty when the fork
    was killed by something else. The fork closes the file descriptors in `leave`."""
    reader, writer = os.pipe()
    child = os.fork()
    if child == 0:
        _write_and_exit(make_answer, writer, leave)
    os.close(writer)
    with os.fdopen(reader, encoding="utf-8") as answer:
        while not select.select([answer], [], [], _LOOK_S)[0]:
            if is_superseded():
                os.kill(child, signal.SIGKILL)
                threading.Thread(target=os.waitpid, args=(child, 0), daemon=True).start()  # freeing its memory takes time
                return {"superseded": True}
        text = answer.read()
    os.waitpid(child, 0)
    return dict(json.loads(text or "{}"))


def _write_and_exit(make_answer: Callable[[], dict[str, Any]], writer: int, leave: tuple[int, ...]) -> None:
    try:
        for file in leave:
            os.close(file)
        with os.fdopen(writer, "w", encoding="utf-8") as answer:
            json.dump(make_answer(), answer, default=str)
    finally:
        os._exit(0)


def main() -> int:
    """Answer until standard input closes, when the app ends; plan ahead between questions."""
    keep_private()
    raise_gc_thresholds()
    hide_gpus()
    os.environ["OMP_NUM_THREADS"] = "1"  # a fork of a process with a team of OpenMP threads waits for them for ever
    out = redirect_stdout()

    def report(message: str) -> None:
        out.write(json.dumps({"progress": message}) + "\n")
        out.flush()

    inbox = Inbox(sys.stdin)
    questions = Questions(report, lambda: inbox.newest)
    outcomes = Outcomes(Path(sys.argv[1]))
    outcomes.clear()

    def plan_ahead(recipe: Recipe, progress: Callable[[str], None]) -> None:
        """Plan a neighbour and note what it came to, or why there is no plan."""
        try:
            plan = questions.plan(recipe, progress)
            values = dataclasses.asdict(outcome_of(plan, 0, plan_in_languages(plan.settings)))
        except FinetuneError as error:
            values = dataclasses.asdict(Outcome(0, problem=error.problems[0][:200]))
        outcomes.add(recipe, values)

    leave = (0, out.fileno())
    prefetcher = PlanPrefetcher(plan_ahead, leave, outcomes.has)
    start_ahead: Callable[[], None] = prefetcher.end
    for question in inbox:
        if question is None:
            start_ahead()
            continue
        prefetcher.end()
        answer = _answer(questions, inbox, question, leave)
        out.write(json.dumps(answer, default=str) + "\n")
        out.flush()
        if "plan" in answer:
            recipe, settings = parse_recipe(question["recipe"], "recipe"), Settings.model_validate(answer["plan"]["plan"])
            start_ahead = functools.partial(prefetcher.start_from, recipe, settings)
    prefetcher.end()
    return 0


if __name__ == "__main__":
    sys.exit(main())
