"""What training took from a model: its loss on general questions and on the rows of the run it went on from, before and now."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from finetune.data.tokenizer import run_tokenizer
from finetune.evaluate.answerer import Answerer, adapter_folder, answer_facts
from finetune.evaluate.journal import Journal
from finetune.evaluate.paired import Difference, difference, in_words
from finetune.evaluate.rows import EvalRows, held_out, probe
from finetune.evaluate.scores import scorer
from finetune.files import remove_left_over, write_json
from finetune.plan.plan import read_plan
from finetune.run.origin import HELD_OUT, origin_of

if TYPE_CHECKING:
    from finetune.run.directory import RunDirectory


@dataclass(frozen=True)
class Lost:
    """Loss of a trained token, in nats, on so many rows.

    `before`: of the base model, or of the adapter that the run went on from. `difference`: now minus before, with the 95 %
    interval of a paired bootstrap; None for fewer than two rows.
    """

    rows_of: str
    rows: int
    before: float | None
    now: float | None
    difference: Difference | None = None

    def in_words(self) -> str:
        """One line, with whether something was lost."""
        gap = self.difference
        told = "" if gap is None or not gap.is_told else "; lost in part" if gap.value > 0 else "; nothing lost"
        losses = f"loss {_number(self.before)} before, {_number(self.now)} now"
        return f"{self.rows_of} ({self.rows:,}): {losses}{told}; {in_words(gap, names='now - before')}"


def what_was_lost(
    run: RunDirectory, *, last: bool = False, load: Callable[[], Answerer] | None = None,
    progress: Callable[[str], None] = lambda _: None,
) -> list[Lost]:  # fmt: skip
    """Losses before and now on the bundled general questions and, of a run that went on, on its first run's held-out rows.

    `load`: gives an answerer that is loaded already, or loads it.
    """
    from finetune.evaluate.score import Made

    plan = read_plan(run.plan)
    tokenizer = run_tokenizer(run.data / "tokenizer", plan.settings)
    folder, origin = adapter_folder(run, last=last), origin_of(run)
    groups: list[tuple[str, EvalRows, str, Path | None]] = [("general questions", probe(tokenizer), "base", None)]
    if origin is not None and (run.origin / HELD_OUT).is_dir():
        groups.append((f"held-out rows of {Path(origin.name).name}", held_out(run, None, first=True), "origin", run.origin))
    load = load or functools.cache(lambda: loaded(run, last))
    found = []
    for name, rows, model, adapter in groups:
        before, now = (
            Made(load, Journal(run.path / "evaluations", who, answer_facts(run, plan, which)), rows, who, None, progress)
            .scored(scorer("loss"))
            for who, which in ((model, adapter), ("tuned", folder))
        )  # fmt: skip
        enough = len(before.row_losses) > 1 and any(before.row_tokens)
        gap = difference(before.row_losses, now.row_losses, before.row_tokens) if enough else None
        found.append(Lost(name, len(rows.ids), before.loss, now.loss, gap))
    path = run.path / "evaluations" / f"lost{'-last' if last else ''}.json"
    with contextlib.suppress(OSError):  # for reports; without room they have none of it
        remove_left_over(path)
        write_json(path, [asdict(each) for each in found])
    return found


def loaded(run: RunDirectory, last: bool) -> Answerer:
    """An answerer that can also use the adapter from which the run went on."""
    return Answerer(run, last=last, others={"origin": run.origin} if run.origin.is_dir() else None)


def read_lost(values: dict[str, Any]) -> Lost:
    """A Lost as it was written."""
    gap = values.get("difference")
    return Lost(**{**values, "difference": Difference(**gap) if gap else None})


def _number(value: float | None) -> str:
    return "not measured" if value is None else f"{value:.4f}"
