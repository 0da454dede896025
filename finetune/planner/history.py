"""Cached measurements of earlier runs, and the cost of a run."""

from __future__ import annotations

import contextlib
import json
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from finetune.events import ENDED_STATES, Event, ForecastCheck, RunWarning, Start, State
from finetune.files import cache_dir, parse_checked, with_checksum, write_text
from finetune.planner.plan import Plan

FILE = "history.jsonl"
#: Runs stored per GPU, the newest.
MOST_RUNS = 20


@dataclass(frozen=True)
class History:
    """Measurements of earlier runs on one GPU, oldest first."""

    rows: Sequence[dict[str, Any]]
    #: Rows modelled with the GPU's current rates, whose times are comparable.
    timed: Sequence[dict[str, Any]]

    def errors(self, name: str) -> list[float]:
        """Return measured / forecast bytes - 1 of each run: `allocated` or `reserved` on a GPU, `process` on a CPU."""
        return [ratio - 1 for ratio in _ratios(self.rows, f"measured_{name}_bytes", f"forecast_{name}_bytes")]

    @property
    def speed_factor(self) -> float | None:
        """Median of measured / modelled step time; None if never measured."""
        factors = _ratios(self.timed, "measured_step_s", "modelled_step_s")
        return statistics.median(factors) if factors else None

    def summary(self, card_name: str, *, rates_known: bool) -> str:
        notes = [f"{len(self.rows)} earlier run{'s' * (len(self.rows) != 1)} on {card_name}"]
        if rates_known and self.speed_factor is not None:
            notes.append(f"steps took {self.speed_factor:.2f} times the modelled time")
        for name in ("allocated", "reserved", "process"):
            if errors := self.errors(name):
                notes.append(f"{name} memory was {min(errors):+.1%} to {max(errors):+.1%} off the forecast")
        return "; ".join(notes)


def _ratios(rows: Sequence[dict[str, Any]], measured_column: str, expected_column: str) -> list[float]:
    columns = (measured_column, expected_column)
    return [row[measured_column] / row[expected_column] for row in rows if all(map(row.get, columns))]


def record_run(plan: Plan, check: ForecastCheck, *, step_s: float | None) -> None:
    """Record a run's measurements and its plan's figures. Raises OSError."""
    row = {
        "card": plan.card.name, "model": plan.settings.model_name_or_path,
        # `step_s`: the median without the first steps, which warm up
        "modelled_step_s": None if plan.settings.vision else plan.modelled_step_s, "measured_step_s": step_s,
        "forecast_allocated_bytes": check.predicted_allocated_bytes, "measured_allocated_bytes": check.measured_allocated_bytes,
        "forecast_reserved_bytes": check.predicted_reserved_bytes, "measured_reserved_bytes": check.measured_reserved_bytes,
        "forecast_process_bytes": check.predicted_peak_bytes if plan.card.is_cpu else None,
        "measured_process_bytes": check.measured_peak_bytes,
        "rates_measured_at": plan.card.rates_measured_at,
    }  # fmt: skip
    earlier_rows = _read_rows()
    of_this_card = [earlier for earlier in earlier_rows if earlier["card"] == plan.card.name]
    dropped = of_this_card[: max(0, len(of_this_card) - MOST_RUNS + 1)]
    rows = [*(earlier for earlier in earlier_rows if earlier not in dropped), row]
    path = cache_dir() / FILE
    path.parent.mkdir(parents=True, exist_ok=True)
    write_text(path, "".join(with_checksum(json.dumps(stored)) + "\n" for stored in rows))


def read_history(card_name: str, rates_measured_at: str = "") -> History:
    """Return earlier runs' measurements on this GPU."""
    rows = [row for row in _read_rows() if row["card"] == card_name][-MOST_RUNS:]
    return History(rows, [row for row in rows if row.get("rates_measured_at", "") == rates_measured_at])


def _read_rows() -> list[dict[str, Any]]:
    rows = []
    with contextlib.suppress(OSError):
        for line in (cache_dir() / FILE).read_bytes().splitlines():
            with contextlib.suppress(ValueError):  # a damaged line is skipped
                row = parse_checked(line)
                if isinstance(row, dict) and isinstance(row.get("card"), str) and all(map(_is_valid_cell, row, row.values())):
                    rows.append(row)
    return rows


def _is_valid_cell(column: str, value: Any) -> bool:
    is_figure = column.startswith(("measured_", "forecast_", "modelled_"))
    return not is_figure or value is None or (type(value) in (int, float) and 0 <= value < 1e30)


def cost_of(seconds: float | None, price_per_hour: float | None) -> float | None:
    """Return the cost; None if time or price is unknown."""
    return None if seconds is None or price_per_hour is None else seconds / 3600 * price_per_hour


def seconds_spent(events: Sequence[Event]) -> float:
    """Sum all attempts of a run, without pauses; repeated steps count again."""
    seconds = 0.0
    last_s: float | None = None  # time of the attempt's last event; None between attempts
    for event in events:
        if event.time_s is None or isinstance(event, RunWarning):  # the next attempt's warning precedes its start
            continue
        state = event.state if isinstance(event, State) else None
        if last_s is None or state in ("queued", "starting"):  # a killed attempt ends with its last event
            last_s = event.time_s if state == "starting" or isinstance(event, Start) else None
        else:
            seconds += event.time_s - last_s
            last_s = None if state in ENDED_STATES else event.time_s
    return seconds
