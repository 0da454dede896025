"""Measure the effect of merging on held-out rows."""

from __future__ import annotations

import functools
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from finetune.evaluate.answerer import Answerer, adapter_folder, answer_limit, answerer_loader
from finetune.evaluate.results import Journal
from finetune.evaluate.rows import held_out_rows, run_encoder
from finetune.evaluate.scorers import scorer
from finetune.model.build import build_base
from finetune.model.transformers_config import load_config
from finetune.run.directory import RunDirectory
from finetune.settings import resolved
from finetune.settings.base_formats import BITS_16, switches


@dataclass(frozen=True)
class MergeEffect:
    """Changed greedy answers, and losses before and after merging."""

    rows: int
    answers_changed: int
    loss: float | None  # loss on the trained tokens, in nats
    merged_loss: float | None


def measure_merge_effect(run: RunDirectory, merged: Path, rows: int, progress: Callable[[str], None]) -> MergeEffect:
    """Compare the tuned and the merged model, loaded in turn. Raise DataError."""
    from finetune.evaluate.score import ModelOutputs, score_models

    eval_rows = held_out_rows(run, rows)
    tokenizer, references = run_encoder(run).tokenizer, eval_rows.references
    max_new_tokens = answer_limit(tokenizer, references, eval_rows.answer_tokens) if references else None

    class MergedAnswerer(Answerer):
        def load(self, adapter: Path | None) -> Any:
            settings = resolved(self.plan.settings, model_name_or_path=str(merged), model_revision=None, **switches(BITS_16))
            return build_base(settings, load_config(settings), device="cpu" if self.device == "cpu" else 0, weights=True).eval()

    models = [("tuned", adapter_folder(run))]
    [before] = score_models(run, answerer_loader(run), eval_rows, models, "exact", max_new_tokens, progress)
    with tempfile.TemporaryDirectory() as empty_folder:
        journal = Journal(Path(empty_folder), "merged", {})
        load = functools.cache(lambda: MergedAnswerer(run))
        after = ModelOutputs(load, journal, eval_rows, "merged", max_new_tokens, progress).score(scorer("exact"))
    changed = sum(old != new for old, new in zip(before.answers, after.answers, strict=True))
    return MergeEffect(len(before.answers), changed, before.loss, after.loss)
