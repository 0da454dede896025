"""Plan: every setting resolved, with its forecast, verdict and a line of reason for each choice. A frozen value."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from finetune.card.card import Card
from finetune.errors import RecipeError
from finetune.forecast.forecast import Forecast
from finetune.recipe import Recipe


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
class Plan:
    """Recipe + card + dataset statistics. `settings` has no `auto` left; the same inputs give the same plan.

    `budget_bytes` is what the run may take of the card; `headroom_bytes` is the budget less the upper end of the forecast,
    negative when that is more. `modelled_step_s` is the speed model's time before runs on this card corrected it. `shortfall`
    says what is missing and why when the plan does not fit; `length_costs` what other limits of length would cost in bytes and
    in dropped tokens; `checks` what host memory and disk have to give; `many_cards` what each of several cards would need under
    every strategy, when one card is too small or the launch splits the model.
    """

    settings: Recipe
    reasons: dict[str, str]
    card: Card
    verdict: str  # fits | tight | does not fit | unknown
    total_steps: int | None = None
    forecast: Forecast | None = None
    data: DataStatistics | None = None
    alternatives: list[dict[str, Any]] = field(default_factory=list)
    suggestions: list[dict[str, Any]] = field(default_factory=list)
    budget_bytes: int | None = None
    headroom_bytes: int | None = None
    modelled_step_s: float | None = None
    shortfall: dict[str, Any] | None = None
    length_costs: list[dict[str, Any]] = field(default_factory=list)
    checks: list[dict[str, Any]] = field(default_factory=list)
    many_cards: dict[str, Any] | None = None

    def as_json(self) -> dict[str, Any]:
        """The content of plan.json and of `finetune plan --json`."""
        return {
            "verdict": self.verdict,
            "plan": self.settings.model_dump(mode="json"),
            "reasons": self.reasons,
            "card": asdict(self.card),
            "total_steps": self.total_steps,
            "forecast": asdict(self.forecast) if self.forecast else None,
            "data": {key: value for key, value in asdict(self.data).items() if key != "lengths"} if self.data else None,
            "alternatives": self.alternatives,
            "suggestions": self.suggestions,
            "budget_bytes": self.budget_bytes,
            "headroom_bytes": self.headroom_bytes,
            "modelled_step_s": self.modelled_step_s,
            "shortfall": self.shortfall,
            "length_costs": self.length_costs,
            "checks": self.checks,
            "many_cards": self.many_cards,
        }

    @classmethod
    def from_json(cls, values: dict[str, Any]) -> Plan:
        """Read back what `as_json` wrote."""
        card, forecast = dict(values["card"]), values["forecast"]
        card["capability"] = tuple(card["capability"]) if card["capability"] else None
        if forecast:
            forecast = Forecast(**{**forecast, "notes": tuple(forecast["notes"])})
        return cls(
            settings=Recipe.model_validate(values["plan"]), reasons=values["reasons"], card=Card(**card), forecast=forecast,
            verdict=values["verdict"], total_steps=values["total_steps"],
            data=DataStatistics(**values["data"]) if values["data"] else None,
            alternatives=values["alternatives"], suggestions=values["suggestions"], budget_bytes=values.get("budget_bytes"),
            headroom_bytes=values.get("headroom_bytes"), modelled_step_s=values.get("modelled_step_s"),
            shortfall=values.get("shortfall"), length_costs=values.get("length_costs", []), checks=values.get("checks", []),
            many_cards=values.get("many_cards"),
        )  # fmt: skip


def read_plan(path: Path) -> Plan:
    """The plan of a run directory's plan.json. Raises RecipeError when it is damaged."""
    try:
        return Plan.from_json(json.loads(path.read_text(encoding="utf-8")))
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise RecipeError(
            f"{path} can't be read: {type(error).__name__}: {error}",
            f"Put it back, or start anew: finetune run {path.with_name('recipe.yaml')}",
        ) from None
