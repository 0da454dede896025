"""Plan: every setting resolved, with its forecast, verdict and a line of reason for each choice. A frozen value.

`as_json` is the content of plan.json and of `finetune plan --json`; docs/plan-json.md is made from these types.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, replace
from enum import StrEnum
from pathlib import Path
from typing import Any

from finetune.card.card import Card
from finetune.errors import DataError, DoesNotFit, RecipeError
from finetune.forecast.forecast import Forecast
from finetune.recipe import Settings
from finetune.serialise import from_json, to_json

#: Of plan.json. Files without a version are of the first one.
VERSION = 1


class Verdict(StrEnum):
    """Whether the plan fits its budget: for certain, perhaps, or not."""

    FITS = "fits"
    TIGHT = "tight"
    NO_FIT = "does not fit"
    UNKNOWN = "unknown"
    NOT_POSSIBLE = "not possible"


def verdict_of(forecast: Forecast, budget_bytes: int) -> Verdict:
    """From the interval: fits when even its upper end does, tight when only its lower end does."""
    if forecast.peak_high_bytes <= budget_bytes:
        return Verdict.FITS
    return Verdict.TIGHT if forecast.peak_low_bytes <= budget_bytes else Verdict.NO_FIT


@dataclass(frozen=True)
class DataStatistics:
    """What the planner knows of the tokenised rows. Lengths in tokens, after the recipe's handling of long rows."""

    rows: int
    eval_rows: int
    total_tokens: int
    trained_tokens: int
    lengths: tuple[int, ...] = ()  # sorted length of each row; empty: not read, max_length is assumed

    @property
    def longest(self) -> int | None:
        """Tokens of the longest row; None when no rows were read."""
        return self.lengths[-1] if self.lengths else None


@dataclass(frozen=True)
class DataProblem:
    """Why the rows can't be trained on as they are, and what to type. The plan is made of those that can."""

    problems: tuple[str, ...]
    fix: str = ""


@dataclass(frozen=True)
class Alternative:
    """A strategy that was forecast. `overrides` are what to type for exactly this plan: all that the recipe leaves open;
    `differs` is what of that is not as in the chosen one."""

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
    """A change to the recipe that saves memory: what to type, bytes saved, the whole card's peak then, and what it costs."""

    override: str
    saves_bytes: int
    peak_bytes: int
    cost: str


@dataclass(frozen=True)
class Shortfall:
    """What is missing at the upper end of the forecast, its largest part, and the largest model of the catalogue that fits."""

    missing_bytes: int
    part: str
    part_bytes: int
    largest_model_that_fits: str | None


@dataclass(frozen=True)
class LengthCost:
    """Another limit of length: bytes it adds (negative: saves), and the rows and tokens it drops."""

    max_length: int
    adds_bytes: int
    dropped_rows: int
    dropped_tokens: int


@dataclass(frozen=True)
class ResourceCheck:
    """Host memory or disk: needed, free (None: not known), and whether that is enough."""

    what: str
    needs_bytes: int
    free_bytes: int | None
    enough: bool | None


@dataclass(frozen=True)
class CardNeeds:
    """What each of several cards needs under a strategy. `override` is what to type; `load_bytes` and `train_bytes` are
    allocated peaks, `peak_high_bytes` the whole card's at most, `host_bytes` a machine's. None where the strategy can't be
    taken, and `cost` says why."""

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
    """Needs of each of `cards` cards with `budget_bytes` each, by strategy."""

    cards: int
    budget_bytes: int
    rows: tuple[CardNeeds, ...]


@dataclass(frozen=True)
class Plan:
    """Recipe + card + dataset statistics. The same inputs give the same plan.

    `budget_bytes` is what the run may take of the card; `headroom_bytes` is the budget less the upper end of the forecast,
    negative when that is more. `modelled_step_s` is the speed model's time before runs on this card corrected it. `shortfall`
    says what is missing and why when the plan does not fit; `length_costs` what other limits of length would cost; `checks`
    what host memory and disk have to give; `many_cards` what each of several cards would need, when one card is too small or
    the launch shards the model. `data_problem` says why a run would refuse the rows.
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
        """Of `finetune plan`: data that a run would refuse, else a plan that does not fit, else 0."""
        if self.data_problem:
            return DataError.exit_code
        return DoesNotFit.exit_code if self.verdict == Verdict.NO_FIT else 0

    def as_json(self) -> dict[str, Any]:
        """With the settings under `plan`, and without the length of every row."""
        values: dict[str, Any] = to_json(self)
        settings = values.pop("settings")
        if values["data"]:
            del values["data"]["lengths"]
        return {"version": VERSION, "verdict": values["verdict"], "plan": settings, **values}

    @classmethod
    def from_json(cls, values: dict[str, Any]) -> Plan:
        """Read back what `as_json` wrote, now or in an earlier version. Raises ValueError and KeyError when it is damaged."""
        values = _upgraded(values) if "version" not in values else dict(values)
        return from_json(cls, {**values, "settings": values.pop("plan")})

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
        raise RecipeError(
            f"{path} can't be read: {type(error).__name__}: {error}",
            f"Put it back, or start anew: finetune run {path.with_name('recipe.yaml')}",
        ) from None
