"""Measured cost of quantising: loss of held-out rows by format of the base weights."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from finetune.files import cache_dir, sha256_of
from finetune.memory.cache import key_of
from finetune.model.weights import configuration_fingerprint, weights_fingerprint
from finetune.serialise import read_json_as, to_json
from finetune.settings.base_formats import INT8, NF4, base_format_of

if TYPE_CHECKING:
    from finetune.data.splits import LimitedSplit
    from finetune.planner.plan import Plan
    from finetune.settings import Settings

#: Most held-out sequences that finetune/evaluate/quantisation.py measures, evenly spaced: losses are paired, so few suffice.
MOST_ROWS = 1_000
#: Columns `input_ids` and `labels` (-100: not trained), each with a list per sequence.
Rows = dict[str, list[list[int]]]


@dataclass(frozen=True)
class FormatLoss:
    """Mean loss per trained token, in nats, with base weights in this format."""

    label: str
    loss: float
    #: Loss minus the plain format's, with its 95 % interval; None for the plain format, or fewer than two rows.
    cost: float | None = None
    cost_low: float | None = None
    cost_high: float | None = None

    @property
    def summary(self) -> str:
        """E.g. `NF4 costs 0.012 of loss (0.008 to 0.016)`."""
        if self.cost is None or self.cost_low is None or self.cost_high is None:
            return f"{self.label} has a loss of {self.loss:.4f}"
        # four decimals, or more if a small cost would have fewer than two significant digits
        digits = max(4, 1 - math.floor(math.log10(abs(self.cost)))) if self.cost else 4
        interval = f"95 % interval {self.cost_low:.{digits}f} to {self.cost_high:.{digits}f}"
        if self.cost_low <= 0 <= self.cost_high:
            return f"{self.label} can't be told from it ({self.cost:+.{digits}f} of loss, {interval})"
        if self.cost < 0:
            return f"{self.label} lowers the loss by {-self.cost:.{digits}f} ({interval})"
        return f"{self.label} costs {self.cost:.{digits}f} of loss ({interval})"


@dataclass(frozen=True)
class QuantisationCost:
    """Losses of a model on the same rows by format, the plain format first."""

    model: str
    rows: int
    #: Trained tokens of the rows.
    tokens: int
    #: Without int8 where int8 neither fits nor can be offloaded.
    formats: tuple[FormatLoss, ...]
    #: The model has a run's adapter.
    tuned: bool = False

    @property
    def sentence(self) -> str:
        plain, *quantised = self.formats
        model = "the tuned model" if self.tuned else "the base model"
        clauses = [f"on {self.rows:,} held-out rows {model} has a loss of {plain.loss:.4f} in {plain.label}"]
        clauses += [entry.summary for entry in quantised]
        if INT8.label not in (entry.label for entry in quantised):
            clauses.append("int8 was not measured: it does not fit, and its layers can't be offloaded")
        return "; ".join(clauses)

    def quote(self, label: str) -> str:
        """Return the measured cost of this format; for the plain format, the cost of NF4."""
        plain, *quantised = self.formats
        quoted_label = NF4.label if label == plain.label else label
        for entry in quantised:
            if entry.label == quoted_label:
                return f"measured on {self.rows:,} of your held-out rows: {entry.summary} against {plain.label}"
        return ""

    def as_json(self) -> dict[str, Any]:
        return {**to_json(self), "sentence": self.sentence}


def held_out_rows(splits: Sequence[LimitedSplit]) -> Rows:
    """Return the held-out rows to measure, of preference pairs the chosen answers."""
    return chosen_rows(splits[1].table() if len(splits) > 1 else None)


def chosen_rows(table: Any) -> Rows:
    """Return at most MOST_ROWS rows of an Arrow table, evenly spaced; none without a table."""
    columns = ["input_ids", "labels"]
    if table is None:
        return {column: [] for column in columns}
    indices = np.linspace(0, len(table) - 1, min(len(table), MOST_ROWS)).round().astype(np.int64)
    return table.select(columns).take(indices).to_pydict()


def cost_path(settings: Settings, rows: Rows, *, on_cpu: bool, adapter: Path | None = None) -> Path:
    """Return the cache file of a measurement of these rows."""
    facts = [weights_fingerprint(settings), configuration_fingerprint(settings), settings.dtype, settings.attn_implementation]
    adapter_hashes = [sha256_of(file) for file in sorted(adapter.glob("adapter_*"))] if adapter else []
    return _folder(settings) / f"{key_of(facts=[*facts, on_cpu, adapter_hashes, rows])}.json"


def with_measured_cost(plan: Plan, splits: Sequence[LimitedSplit]) -> Plan:
    """Quote the measured cost in the plan's reason for its weight format."""
    settings = plan.settings
    if not _folder(settings).is_dir():  # nothing measured: don't hash weights
        return plan
    try:
        path = cost_path(settings, held_out_rows(splits), on_cpu=plan.card.is_cpu)
    except (OSError, ValueError):  # rows or weights are gone: the plan lacks only the quote
        return plan
    cost = read_json_as(path, QuantisationCost)
    if cost is None:
        return plan
    base = base_format_of(settings)
    setting, quote = base.setting or NF4.setting, cost.quote(base.label)
    reason = plan.reasons.get(setting, quote)
    return plan if quote in reason else replace(plan, reasons={**plan.reasons, setting: f"{reason}; {quote}"})


def _folder(settings: Settings) -> Path:
    return cache_dir() / "quantisation" / Path(settings.model_name_or_path).name
