"""Measure forgetting: loss before and after training, and needless tool calls."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import asdict
from pathlib import Path

from finetune.data.chat_format import ChatFormat
from finetune.data.tokenizer import run_tokenizer
from finetune.data.tokens import Encoder
from finetune.errors import DataError
from finetune.evaluate.answerer import Answerer, adapter_folder, answer_journal, answerer_loader
from finetune.evaluate.paired import difference
from finetune.evaluate.results import Forgetting, NoCall, Score, keep_result
from finetune.evaluate.rows import EvalRows, held_out_rows, no_call_rows, probe_rows
from finetune.evaluate.scorers import scorer
from finetune.planner.plan import read_plan
from finetune.run.base_adapter import HELD_OUT, base_adapter_of
from finetune.run.directory import RunDirectory

#: Tokens of an answer: enough to begin a call, which counts.
_CALL_TOKENS = 48


def measure_forgetting(
    run: RunDirectory, *, last: bool = False, load: Callable[[], Answerer] | None = None,
    progress: Callable[[str], None] = lambda _: None,
) -> list[Forgetting]:  # fmt: skip
    """Measure losses on general questions, and on held-out rows of the run that this run continued."""
    tokenizer = run_tokenizer(run.data / "tokenizer", read_plan(run.plan).settings)
    folder, origin = adapter_folder(run, last=last), base_adapter_of(run)
    groups: list[tuple[str, EvalRows, str, Path | None]] = [("general questions", probe_rows(tokenizer), "base", None)]
    if origin is not None and (run.base_adapter / HELD_OUT).is_dir():
        rows = held_out_rows(run, None, of_first_run=True)
        groups.append((f"held-out rows of {Path(origin.name).name}", rows, "origin", run.base_adapter))
    load = load or answerer_loader(run, last)
    results = []
    for name, rows, reference, reference_adapter in groups:
        models = ((reference, reference_adapter), ("tuned", folder))
        before, now = _scores(run, load, rows, models, "loss", None, progress)
        interval = difference(before.row_losses, now.row_losses, before.row_tokens)
        results.append(Forgetting(name, len(rows.ids), before.loss, now.loss, interval))
    keep_result(run, f"lost{'-last' if last else ''}.json", {"groups": [asdict(result) for result in results]})
    return results


def measure_no_call(
    run: RunDirectory, load: Callable[[], Answerer], *, last: bool = False, progress: Callable[[str], None] = lambda _: None
) -> NoCall | None:
    """Measure how many questions without need for a tool get no call; None for a run without tools."""
    try:
        if not held_out_rows(run, None).calls:
            return None
        encoder = Encoder(run_tokenizer(run.data / "tokenizer", read_plan(run.plan).settings), conversations=True)
        rows = no_call_rows(encoder)
    except DataError:
        # no held-out rows, or a chat template that refuses the questions
        return None
    if encoder.chat_format.syntax is None:
        return None
    models = (("base", None), ("tuned", adapter_folder(run, last=last)))
    before, now = _scores(run, load, rows, models, "calls", _CALL_TOKENS, progress, encoder.chat_format)
    result = NoCall(len(rows.prompts), before.score, now.score, difference(before.scores, now.scores, span=1.0))
    keep_result(run, f"no-call{'-last' if last else ''}.json", asdict(result))
    return result


def _scores(
    run: RunDirectory, load: Callable[[], Answerer], rows: EvalRows, models: Iterable[tuple[str, Path | None]], name: str,
    max_new_tokens: int | None, progress: Callable[[str], None], chat_format: ChatFormat | None = None,
) -> list[Score]:  # fmt: skip
    from finetune.evaluate.score import ModelOutputs

    outputs = (
        ModelOutputs(load, answer_journal(run, model, adapter), rows, model, max_new_tokens, progress, chat_format)
        for model, adapter in models
    )
    return [of_model.score(scorer(name)) for of_model in outputs]
