"""What quantising costs, for `plan --measure`, `run --measure` and `eval --quantisation`: measured by a process of its own."""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

from finetune.card.visible import environment_with_gpus
from finetune.errors import CommandError, DataError, FinetuneError
from finetune.files import write_json
from finetune.planner.quantisation_cost import QuantisationCost, Sequences
from finetune.run.card import cards_of, visibility
from finetune.serialise import from_json, to_json

if TYPE_CHECKING:
    from finetune.card.card import Card
    from finetune.planner.plan import Plan
    from finetune.planner.planning import RowsRead
    from finetune.run.directory import RunDirectory
    from finetune.settings import Recipe

Progress = Callable[[str], None]
_NO_ROWS = "no rows are held out"
_HOLD_OUT = "Set dataset.test_split_size=0.1, or dataset.eval_path=FILE."


def measure_recipe(recipe: Recipe, card: Card, rows: Callable[[Recipe], RowsRead], progress: Progress) -> QuantisationCost:
    """The base's losses on the recipe's held-out rows. Raises CommandError where nothing can be measured."""
    from finetune.planner.planning import plan_recipe

    if not card.is_cpu and card.source == "catalogue":
        raise CommandError(f"measuring needs {card.name}, which is not in this machine", "Set gpu=auto, or measure nothing.")
    held_out_readers: list[Callable[[], Sequences] | None] = []

    def read(resolved: Recipe) -> RowsRead:
        rows_read = rows(resolved)
        held_out_readers.append(rows_read.held_out)
        return rows_read

    plan = plan_recipe(recipe, card, read, progress=progress)
    if held_out_readers[-1] is None and plan.data_problem:
        raise DataError([*plan.data_problem.problems], plan.data_problem.fix)
    return measure_plan(plan, held_out_readers[-1], progress)


def measure_plan(
    plan: Plan, held_out: Callable[[], Sequences] | None, progress: Progress, adapter: Path | None = None
) -> QuantisationCost:
    """The losses of a plan's base model, or with an adapter. Raises CommandError without held-out rows, and what the measuring
    process raises."""
    if held_out is None:
        raise CommandError(_NO_ROWS, _HOLD_OUT)
    from finetune.evaluate.quantisation import Job

    free_bytes = None if plan.card.is_cpu else plan.usable_bytes
    cards = cards_of(plan)[:1]
    job = Job(plan.settings, held_out(), free_bytes, cards or (() if plan.card.is_cpu else (plan.card.name,)), adapter)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "job.json"
        write_json(path, to_json(job))
        return _run(path, {**environment_with_gpus(), **visibility(cards)}, progress)


def _run(path: Path, environment: dict[str, str], progress: Progress) -> QuantisationCost:
    command = [sys.executable, "-P", "-m", "finetune.evaluate.quantisation", str(path)]
    errors_path, last = path.with_name("errors"), ""
    with errors_path.open("wb") as errors, subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=errors, text=True, encoding="utf-8",
        env={**environment, "PYTHONUTF8": "1", "TOKENIZERS_PARALLELISM": "false"},
    ) as process:  # fmt: skip
        assert process.stdout is not None
        try:
            for line in process.stdout:
                last = line.strip()
                if not last.startswith("{"):
                    progress(last)
        except BaseException:
            process.terminate()
            raise
    if process.returncode:
        stderr = errors_path.read_text("utf-8", errors="replace").strip()
        reason = stderr.rpartition("\n")[2] or "its process was killed"
        raise FinetuneError.written_by(stderr) or FinetuneError(f"measuring ended: {reason}")
    return from_json(QuantisationCost, json.loads(last))


def measure_run(run: RunDirectory, adapter: Path, progress: Progress) -> dict[str, QuantisationCost]:
    """A run's base and tuned model on its held-out rows. Raises CommandError without such rows."""
    from finetune.planner.plan import read_plan
    from finetune.planner.quantisation_cost import stored_sequences

    plan = read_plan(run.plan)
    held_out = stored_sequences(run.data / "eval")
    return {name: measure_plan(plan, held_out, progress, folder) for name, folder in (("base", None), ("tuned", adapter))}


def won_back(run: RunDirectory, base: QuantisationCost) -> int | None:
    """Steps of the run after which its held-out loss had fallen by what its format costs; None where that is not known."""
    from finetune.evaluate.quantisation import steps_to_win_back
    from finetune.events import Evaluation, read_events
    from finetune.planner.plan import read_plan
    from finetune.settings.base_formats import base_format_of

    entry = base.of(base_format_of(read_plan(run.plan).settings).label)
    if entry is None or entry.cost is None:
        return None
    evaluations = [event for event in read_events(run.events) if isinstance(event, Evaluation) and event.step > 0]
    curve = {0: entry.loss} | {event.step: event.eval_loss for event in evaluations if event.eval_loss is not None}
    return steps_to_win_back(entry.cost, sorted(curve.items()))
