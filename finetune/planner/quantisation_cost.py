"""What quantising costs: the loss of held-out rows in 16 bit, int8 and NF4, as measured and kept in the cache.

finetune/evaluate/quantisation.py measures it; a plan's reason for its number of bits quotes it.
"""

from __future__ import annotations

import hashlib
import json
import math
import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from finetune.files import cache_dir
from finetune.model.weights import configuration_fingerprint, weights_fingerprint
from finetune.serialise import read_own, to_json
from finetune.settings.base_formats import NF4, base_format_of

if TYPE_CHECKING:
    from finetune.data.splits import LimitedSplit
    from finetune.settings import Settings

#: Held-out sequences that are measured, evenly chosen where there are more: the losses are paired, so few tell much.
MOST_ROWS = 1_000
_LIBRARIES = ("bitsandbytes", "torch", "transformers")


@dataclass(frozen=True)
class Sequences:
    """Tokens and labels (-100: not trained) of held-out sequences."""

    ids: list[list[int]]
    labels: list[list[int]]


@dataclass(frozen=True)
class FormatLoss:
    """Mean loss of a trained token, in nats, with base weights in this format.

    `cost`: loss minus that of the plain format, with its 95 % interval; None of the plain one and for fewer than two rows.
    """

    label: str
    loss: float
    cost: float | None = None
    cost_low: float | None = None
    cost_high: float | None = None

    @property
    def summary(self) -> str:
        """`NF4 costs 0.012 of loss (0.008 to 0.016)`."""
        if self.cost is None or self.cost_low is None or self.cost_high is None:
            return f"{self.label} has a loss of {self.loss:.4f}"
        digits = max(4, 1 - math.floor(math.log10(abs(self.cost)))) if self.cost else 4
        interval = f"95 % interval {self.cost_low:.{digits}f} to {self.cost_high:.{digits}f}"
        if self.cost_low <= 0 <= self.cost_high:
            return f"{self.label} can't be told from it ({self.cost:+.{digits}f} of loss, {interval})"
        if self.cost < 0:
            return f"{self.label} lowers the loss by {-self.cost:.{digits}f} ({interval})"
        return f"{self.label} costs {self.cost:.{digits}f} of loss ({interval})"


@dataclass(frozen=True)
class QuantisationCost:
    """Losses of a model on the same rows by format of its base weights, the plain format first.

    `tuned`: with a run's adapter. `tokens`: trained tokens of the rows. `left_out`: formats that were not measured, and why.
    """

    model: str
    rows: int
    tokens: int
    formats: tuple[FormatLoss, ...]
    tuned: bool = False
    left_out: tuple[str, ...] = ()

    @property
    def sentence(self) -> str:
        plain, *others = self.formats
        who = "the tuned model" if self.tuned else "the base model"
        measured = f"on {self.rows:,} held-out rows {who} has a loss of {plain.loss:.4f} in {plain.label}"
        return "; ".join([measured, *(other.summary for other in others), *self.left_out])

    def of(self, label: str) -> FormatLoss | None:
        return next((entry for entry in self.formats if entry.label == label), None)

    def quote(self, label: str) -> str:
        """What a reason for this format says; empty where it was not measured."""
        plain, chosen, nf4 = self.formats[0], self.of(label), self.of(NF4.label)
        entry = nf4 if chosen is plain else chosen
        if entry is None or entry is plain:
            return ""
        return f"measured on {self.rows:,} of your held-out rows: {entry.summary} against {plain.label}"

    def as_json(self) -> dict[str, Any]:
        """As documented in docs/sweeps.md."""
        return {**to_json(self), "sentence": self.sentence}


def held_out_sequences(splits: Sequence[LimitedSplit]) -> Callable[[], Sequences] | None:
    """Reads the held-out sequences that are measured (of pairs the chosen answers); None where no rows are held out.

    `splits`: the training rows, and the held-out ones if there are any.
    """
    if len(splits) < 2 or not len(splits[1].lengths):  # noqa: PLR2004 - training rows, held-out rows
        return None
    return lambda: _chosen(splits[1].tables(), len(splits[1].lengths))


def stored_sequences(folder: Path) -> Callable[[], Sequences] | None:
    """The same of a run's held-out rows; None where it has none."""
    if not folder.is_dir():
        return None

    def read() -> Sequences:
        from datasets import load_from_disk

        rows: Any = load_from_disk(str(folder))
        return _chosen([rows.with_format("arrow")[:]], len(rows))

    return read


def _chosen(tables: Iterable[Any], count: int) -> Sequences:
    """At most MOST_ROWS of `count` rows, evenly."""
    chosen = np.unique(np.linspace(0, count - 1, min(count, MOST_ROWS)).round().astype(np.int64))
    ids, labels, first = [], [], 0
    for table in tables:
        rows = table.take(chosen[(chosen >= first) & (chosen < first + table.num_rows)] - first)
        first += table.num_rows
        ids += rows["input_ids"].to_pylist()
        labels += rows["labels"].to_pylist()
    return Sequences(ids, labels)


def read_cost(settings: Settings, sequences: Callable[[], Sequences], *, on_cpu: bool) -> QuantisationCost | None:
    """The base model's cost on these rows where an earlier measurement is in the cache; else None."""
    folder, prefix = _folder_and_prefix(settings)
    if not any(folder.glob(f"{prefix}*.json")):  # without it no weights are hashed
        return None
    try:
        path = cost_path(settings, sequences(), on_cpu=on_cpu)
    except (OSError, ValueError):  # rows or weights are gone: the plan only lacks the quote
        return None
    return read_own(path, QuantisationCost, "cost")


def cost_path(settings: Settings, sequences: Sequences, *, on_cpu: bool, adapter: Sequence[str] = ()) -> Path:
    """The file of a measurement, by all that decides it: weights, rows, dtype, libraries, hashes of an adapter's files."""
    rows = hashlib.sha256()
    for row in (*sequences.ids, *sequences.labels):
        rows.update(np.asarray(row, dtype=np.int64).tobytes() + b"|")
    facts = [
        weights_fingerprint(settings), configuration_fingerprint(settings), rows.hexdigest(), settings.dtype,
        settings.attn_implementation, "cpu" if on_cpu else "cuda", list(adapter), {name: version(name) for name in _LIBRARIES},
    ]  # fmt: skip
    key = hashlib.sha256(json.dumps(facts, sort_keys=True).encode()).hexdigest()[:24]
    folder, prefix = _folder_and_prefix(settings)
    return folder / f"{prefix}{key}.json"


def with_quote(reasons: dict[str, str], settings: Settings, cost: QuantisationCost | None) -> dict[str, str]:
    """The reasons, with the measured cost in that for the number of bits."""
    base = base_format_of(settings)
    quote = cost.quote(base.label) if cost else ""
    setting = base.setting or NF4.setting
    return {**reasons, setting: f"{reasons[setting]}; {quote}"} if quote and setting in reasons else reasons


def _folder_and_prefix(settings: Settings) -> tuple[Path, str]:
    slug = re.sub(r"[^\w.-]+", "-", Path(settings.model_name_or_path).name)[:60]
    return cache_dir() / "quantisation", f"{slug}-"
