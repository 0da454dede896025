"""Forgetting: loss before and after training, on general questions and on the rows of the run that this one continued."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path

from finetune.data.tokenizer import run_tokenizer
from finetune.evaluate.answerer import Answerer, adapter_folder, answer_inputs
from finetune.evaluate.journal import Journal
from finetune.evaluate.paired import difference
from finetune.evaluate.results import Forgetting, keep_result
from finetune.evaluate.rows import EvalRows, held_out_rows, probe_rows
from finetune.evaluate.scorers import scorer
from finetune.planner.plan import read_plan
from finetune.run.base_adapter import HELD_OUT, base_adapter_of
from finetune.run.directory import RunDirectory


def measure_forgetting(
    run: RunDirectory, *, last: bool = False, load: Callable[[], Answerer] | None = None,
    progress: Callable[[str], None] = lambda _: None,
) -> list[Forgetting]:  # fmt: skip
    """Losses before and now on the bundled general questions and, if the run continued another, on that one's held-out rows.

    `load`: returns an answerer, loaded on the first call.
    """
    from finetune.evaluate.score import ModelOutputs

    plan = read_plan(run.plan)
    tokenizer = run_tokenizer(run.data / "tokenizer", plan.settings)
    folder, origin = adapter_folder(run, last=last), base_adapter_of(run)
    groups: list[tuple[str, EvalRows, str, Path | None]] = [("general questions", probe_rows(tokenizer), "base", None)]
    if origin is not None and (run.base_adapter / HELD_OUT).is_dir():
        rows = held_out_rows(run, None, of_first_run=True)
        groups.append((f"held-out rows of {Path(origin.name).name}", rows, "origin", run.base_adapter))
    load = load or functools.cache(lambda: load_answerer(run, last))
    results = []
    for name, rows, reference, reference_adapter in groups:
        scores = []
        for model, adapter in ((reference, reference_adapter), ("tuned", folder)):
            journal = Journal(run.path / "evaluations", model, answer_inputs(run, plan, adapter))
            scores.append(ModelOutputs(load, journal, rows, model, None, progress).score(scorer("loss")))
        before, now = scores
        has_interval = len(before.row_losses) > 1 and any(before.row_tokens)
        interval = difference(before.row_losses, now.row_losses, before.row_tokens) if has_interval else None
        results.append(Forgetting(name, len(rows.ids), before.loss, now.loss, interval))
    keep_result(run, f"lost{'-last' if last else ''}.json", {"groups": [asdict(result) for result in results]})
    return results


def load_answerer(run: RunDirectory, last: bool) -> Answerer:
    """An answerer that can also use the adapter that the run continued."""
    return Answerer(run, last=last, other_adapters={"origin": run.base_adapter} if run.base_adapter.is_dir() else None)
