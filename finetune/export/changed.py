"""What merging changes: the adapter on the weights it was trained on, against the merged 16-bit model, on held-out rows."""

from __future__ import annotations

import functools
import tempfile
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from finetune.data.tokenizer import run_tokenizer
from finetune.evaluate.answerer import Answerer, adapter_folder, answer_facts, longest
from finetune.evaluate.journal import Journal
from finetune.evaluate.scores import scorer
from finetune.plan.plan import read_plan
from finetune.recipe import resolved

if TYPE_CHECKING:
    from finetune.run.directory import RunDirectory


@dataclass(frozen=True)
class Changed:
    """Greedy answers that differ, of so many, and the loss on the trained tokens (nats) before and after merging."""

    rows: int
    answers_changed: int
    loss: float | None
    merged_loss: float | None

    def as_json(self) -> dict[str, Any]:
        """All fields."""
        return asdict(self)


class _Merged(Answerer):
    """The merged model of a run, as programs load it: in 16 bit, without an adapter."""

    def __init__(self, run: RunDirectory, folder: Path) -> None:
        self._folder = folder
        super().__init__(run)

    def load(self, adapter: Path | None) -> Any:
        from finetune.model.build import build_base
        from finetune.model.transformers_config import load_config

        settings = resolved(
            self.plan.settings,
            model_name_or_path=str(self._folder),
            model_revision=None,
            load_in_4bit=False,
            load_in_8bit=False,
        )
        return build_base(settings, load_config(settings), device="cpu" if self.device == "cpu" else 0, weights=True).eval()


def what_merging_changes(run: RunDirectory, folder: Path, rows: int, progress: Callable[[str], None]) -> Changed:
    """Answer at most so many held-out rows with both. Raises DataError when there are none; one model is loaded at a time."""
    from finetune.evaluate.rows import held_out
    from finetune.evaluate.score import Made

    plan, score = read_plan(run.plan), scorer("exact")
    found = held_out(run, rows)
    new = longest(run_tokenizer(run.data / "tokenizer", plan.settings), found.references) + 16 if found.references else None
    journal = Journal(run.path / "evaluations", "tuned", answer_facts(run, plan, adapter_folder(run)))
    before = Made(functools.cache(lambda: Answerer(run)), journal, found, "tuned", new, progress).scored(score)
    with tempfile.TemporaryDirectory() as nowhere:
        fresh = Journal(Path(nowhere), "merged", {})
        after = Made(functools.cache(lambda: _Merged(run, folder)), fresh, found, "merged", new, progress).scored(score)
    different = sum(one != other for one, other in zip(before.answers, after.answers, strict=True))
    return Changed(len(before.answers), different, before.loss, after.loss)
