"""Plan: every setting resolved, with its reason, the forecast and the verdict. A frozen value.

`as_json` is the content of plan.json and of `finetune plan --json`; docs/plan-json.md is made from these types.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, replace
from enum import StrEnum
from functools import cached_property
from itertools import accumulate
from pathlib import Path
from typing import Any

from finetune.card.card import Card
from finetune.errors import CommandError, DataError, DoesNotFit
from finetune.forecast.forecast import Forecast
from finetune.recipe import Settings
from finetune.serialise import from_json, to_json

#: Version of plan.json. The first version had no such key.
VERSION = 1


class Verdict(StrEnum):
    """Whether the plan fits its budget."""

    FITS = "fits"
    AT_LIMIT = "at the limit"
    TIGHT = "tight"
    NO_FIT = "does not fit"
    UNKNOWN = "unknown"
    NOT_POSSIBLE = "not possible"


def verdict_of(forecast: Forecast, budget_bytes: int) -> Verdict:
    """Fits when the forecast's upper end is within the budget, tight when only its lower end is. At the limit: when torch can
    stay within it by giving cached blocks back, also at the upper end of what is allocated."""
    if forecast.peak_high_bytes <= budget_bytes:
        return Verdict.FITS
    if forecast.at_limit is not None:
        return Verdict.AT_LIMIT
    return Verdict.TIGHT if forecast.peak_low_bytes <= budget_bytes else Verdict.NO_FIT


@dataclass(frozen=True)
class DataStatistics:
    """Statistics of the tokenised rows. Lengths in tokens, after the recipe's handling of long rows."""

    rows: int
    eval_rows: int
    total_tokens: int
    trained_tokens: int
    lengths: tuple[int, ...] = ()  # sorted, one per row; empty: rows not read, max_length is assumed

    @property
    def longest(self) -> int | None:
        """Tokens of the longest row; None when no rows were read."""
        return self.lengths[-1] if self.lengths else None

    @cached_property
    def ends(self) -> list[tuple[int, int]]:
        """Each length once, in order, with the number of rows up to it: far fewer than a million rows."""
        counts = sorted(Counter(self.lengths).items())
        return list(zip((length for length, _ in counts), accumulate(count for _, count in counts), strict=True))


@dataclass(frozen=True)
class DataProblem:
    """Why a run would refuse the rows, and the fix. The plan uses the valid rows."""

    problems: tuple[str, ...]
    fix: str = ""


@dataclass(frozen=True)
class Alternative:
    """A strategy that was forecast. `overrides` give exactly this plan (every setting the recipe leaves open); `differs` are
    those that differ from the chosen plan."""

    plan: str
    peak_bytes: int
    peak_high_bytes: int
    step_s: float | None
    tokens_per_s: float | None
    verdict: Verdict
    overrides: str
    differs: str
    chosen: bool = False


@dataclass(frozen=True)
class Suggestion:
    """A change to the recipe that saves memory: override, bytes saved, the card's peak with it, and what it costs."""

    override: str
    saves_bytes: int
    peak_bytes: int
    cost: str


@dataclass(frozen=True)
class Shortfall:
    """Bytes missing at the forecast's upper end, the largest part, and the largest catalogue model that fits."""

    missing_bytes: int
    part: str
    part_bytes: int
    largest_model_that_fits: str | None


@dataclass(frozen=True)
class LengthCost:
    """Another max_length: bytes it adds (negative: saves), rows and tokens it drops."""

    max_length: int
    adds_bytes: int
    dropped_rows: int
    dropped_tokens: int


@dataclass(frozen=True)
class ResourceCheck:
    """Host memory or disk: bytes needed, bytes free (None: unknown), and whether that is enough."""

    what: str
    needs_bytes: int
    free_bytes: int | None
    enough: bool | None


@dataclass(frozen=True)
class CardNeeds:
    """Memory per card under a launch strategy, chosen with `override`. `load_bytes` and `train_bytes` are allocated peaks,
    `peak_high_bytes` the upper end for the whole card, `host_bytes` per machine. None where the strategy can't be used; `cost`
    says why."""

    strategy: str
    override: str
    load_bytes: int | None = None
    train_bytes: int | None = None
    peak_high_bytes: int | None = None
    host_bytes: int | None = None
    verdict: Verdict = Verdict.NOT_POSSIBLE
    cost: str = ""


@dataclass(frozen=True)
class ManyCards:
    """Memory per card on `cards` cards with `budget_bytes` each, by launch strategy."""

    cards: int
    budget_bytes: int
    rows: tuple[CardNeeds, ...]


@dataclass(frozen=True)
class Plan:
    """Recipe + card + dataset statistics. The same inputs give the same plan.

    `budget_bytes`: the card's memory that the run may take. `headroom_bytes`: budget less the forecast's upper end, negative
    when it does not fit. `modelled_step_s`: the speed model's step time before correction by earlier runs. `shortfall`: what
    is missing when the plan does not fit. `length_costs`: costs of other max_lengths. `checks`: host memory and disk needed.
    `many_cards`: memory per card, when one card is too small or the launch shards the model. `data_problem`: why a run would
    refuse the rows.
    """

    settings: Settings
    reasons: Mapping[str, str]
    card: Card
    verdict: Verdict
    total_steps: int | None = None
    forecast: Forecast | None = None
    data: DataStatistics | None = None
    alternatives: tuple[Alternative, ...] = ()
    suggestions: tuple[Suggestion, ...] = ()
    budget_bytes: int | None = None
    headroom_bytes: int | None = None
    modelled_step_s: float | None = None
    shortfall: Shortfall | None = None
    length_costs: tuple[LengthCost, ...] = ()
    checks: tuple[ResourceCheck, ...] = ()
    many_cards: ManyCards | None = None
    data_problem: DataProblem | None = None

    @property
    def exit_code(self) -> int:
        """Exit code of `finetune plan`: what a run would end with before it starts.

        4 for rows that it would refuse; else 3 when the plan does not fit, or torch can't use this machine's card; else 0.
        """
        if self.data_problem:
            return DataError.exit_code
        return DoesNotFit.exit_code if self.verdict == Verdict.NO_FIT or self.card.problem else 0

    def as_json(self) -> dict[str, Any]:
        """The content of plan.json: settings under `plan`, without the lengths of the rows."""
        values: dict[str, Any] = to_json(self)
        settings = values.pop("settings")
        if values["data"]:
            del values["data"]["lengths"]
        return {"version": VERSION, "verdict": values["verdict"], "plan": settings, **values}

    @classmethod
    def from_json(cls, values: dict[str, Any]) -> Plan:
        """Read back what `as_json` wrote, now or in an earlier version. Raises ValueError and KeyError when it is damaged."""
        values = _upgraded(values) if "version" not in values else dict(values)
        # a run from before there were any goes on without
        before = {"lean_layers": False, "mlp_tile_tokens": 0, "offload_embeddings": False}
        settings = {**before, **values.pop("plan")}
        return from_json(cls, {**values, "settings": settings})

    def noting(self, note: str) -> Plan:
        """The same plan with one more note on its forecast."""
        if not note or not self.forecast:
            return self
        return replace(self, forecast=replace(self.forecast, notes=(*self.forecast.notes, note)))


def _upgraded(values: dict[str, Any]) -> dict[str, Any]:
    """A plan.json of the first version: the chosen alternative had a word in place of its overrides."""
    rows = [
        {**row, "chosen": True, "overrides": "", "differs": ""} if row["overrides"] == "chosen" else row
        for row in values["alternatives"]
    ]
    return {**values, "alternatives": rows}


def read_plan(path: Path) -> Plan:
    """The plan of a run directory's plan.json. Raises RecipeError when it is damaged."""
    try:
        return Plan.from_json(json.loads(path.read_text(encoding="utf-8")))
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise CommandError(
            f"{path} can't be read: {type(error).__name__}: {error}",
            f"Restore it, or start again: finetune run {path.with_name('recipe.yaml')}",
        ) from None
