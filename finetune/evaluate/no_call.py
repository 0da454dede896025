"""Restraint: whether a model leaves tools alone where none is due, on bundled questions, base against tuned."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict

from finetune.data.tokenizer import run_tokenizer
from finetune.data.tokens import Encoder
from finetune.errors import DataError
from finetune.evaluate.answerer import Answerer, adapter_folder, answer_inputs
from finetune.evaluate.journal import Journal
from finetune.evaluate.paired import difference
from finetune.evaluate.results import NoCall, keep_result
from finetune.evaluate.rows import held_out_rows, no_call_rows
from finetune.evaluate.scorers import scorer
from finetune.planner.plan import read_plan
from finetune.run.directory import RunDirectory

#: Tokens of an answer: enough to begin a call, which counts.
_ANSWER_TOKENS = 48


def measure_no_call(
    run: RunDirectory, load: Callable[[], Answerer], *, last: bool = False, progress: Callable[[str], None] = lambda _: None
) -> NoCall | None:
    """Share of the bundled questions that are answered without a call, before and now.

    None for a run whose held-out rows have no tools, and for a chat template that writes none or refuses the questions.
    """
    from finetune.evaluate.score import ModelOutputs

    plan = read_plan(run.plan)
    try:
        if not held_out_rows(run, None).calls:
            return None
        encoder = Encoder(run_tokenizer(run.data / "tokenizer", plan.settings), conversations=True)
        rows = no_call_rows(encoder)
    except DataError:
        return None
    if encoder.answers.syntax is None:
        return None
    scores = []
    for model, adapter in (("base", None), ("tuned", adapter_folder(run, last=last))):
        journal = Journal(run.path / "evaluations", model, answer_inputs(run, plan, adapter))
        outputs = ModelOutputs(load, journal, rows, model, _ANSWER_TOKENS, progress, encoder.answers)
        scores.append(outputs.score(scorer("calls")))
    before, now = scores
    result = NoCall(len(rows.prompts), before.score, now.score, difference(before.scores, now.scores, span=1.0))
    keep_result(run, f"no-call{'-last' if last else ''}.json", asdict(result))
    return result
