"""Create a sweep: plan each arm, leave out what does not fit, and write its run directories."""

from __future__ import annotations

import hashlib
import json
import math
import re
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from finetune.card.device_selection import alike_cards
from finetune.errors import CommandError, DataError, DoesNotFit
from finetune.planner.plan import Plan
from finetune.recipe import write_recipe
from finetune.run.held_out import let_train
from finetune.settings import AUTO, Recipe
from finetune.sweep.grid import combinations, nearest_to_centre, rates_around
from finetune.sweep.halving import RULE, rungs_of
from finetune.sweep.sweep import ArmFacts, LeftOut, Sweep, SweepFacts, label, write_sweep
from finetune.units import format_seconds

if TYPE_CHECKING:
    from finetune.run.prepare import Prepared

Progress = Callable[[str], None]


class RunSeconds(NamedTuple):
    """Seconds of a whole run: before its first step, which a run that goes on takes again, and from then on."""

    load_s: float
    train_s: float


def create_sweep(
    recipe_of: Callable[[dict[str, Any]], Recipe], swept: dict[str, list[Any]], *, budget_s: float | None = None,
    progress: Progress = lambda _: None,
) -> Sweep:  # fmt: skip
    """Plan the arms and write them. `recipe_of`: the recipe with an arm's values; no values: the plain one.

    Without swept settings the learning rate is swept around the planner's advice. Raises what `prepare` raises, and
    CommandError when fewer than two arms are left.
    """
    from finetune.run.prepare import create_run, prepare

    plain = prepare(_arm_recipe(recipe_of({}), None), progress=progress)
    if not (plain.plan.data and plain.plan.data.eval_rows):
        raise DataError("a sweep compares held-out losses, and no rows are held out", "Add dataset.test_split_size=0.1.")
    swept = swept or {"learning_rate": rates_around(plain.plan.settings.learning_rate)}
    values = combinations(swept)
    cards = _cards(recipe_of({}), plain.plan)
    seconds = _run_seconds(plain.plan)
    left_out: list[LeftOut] = []
    if budget_s is not None:
        values, left_out = _within(budget_s, seconds, values, swept, len(cards))
    path = _folder(recipe_of({}), swept)
    prepared, too_large = _prepared(recipe_of, values, path, cards, progress)
    left_out += too_large
    if len(prepared) < 2:  # noqa: PLR2004 - a comparison needs two
        reasons = [f"{label(entry.values)}: {entry.reason}" for entry in left_out]
        raise CommandError([f"{len(prepared)} arm is left to compare", *reasons], "Give more values, or a longer --budget.")
    steps = {arm.plan.total_steps for _, _, arm in prepared}
    if None in steps or len(steps) > 1:
        raise CommandError(
            f"the arms have different numbers of steps: {sorted(filter(None, steps))}", "Set max_steps, the same for all."
        )
    arms: list[ArmFacts] = []
    for name, arm_values, arm in prepared:
        progress(f"writing {name}")
        let_train(create_run(arm), None)
        arms.append(ArmFacts(name, arm_values, cards[len(arms) % len(cards)]))
    rungs = rungs_of(int(steps.pop() or 1))
    forecast_s = None if seconds is None else _most_seconds(seconds, len(arms), rungs, len(cards))
    facts = SweepFacts(
        write_recipe(recipe_of({})), swept, tuple(arms), tuple(rungs), RULE, tuple(left_out), budget_s, forecast_s
    )
    sweep = Sweep(path, facts)
    write_sweep(sweep)
    return sweep


def _run_seconds(plan: Plan) -> RunSeconds | None:
    """Of one arm's whole run: by earlier runs here, else by the speed model; None where neither is known."""
    if plan.run_time:
        return RunSeconds(plan.run_time.load_s, plan.run_time.train_s)
    step_s = plan.forecast.step_s if plan.forecast else None
    return RunSeconds(0.0, step_s * plan.total_steps) if step_s and plan.total_steps else None


def _cards(recipe: Recipe, plan: Plan) -> list[str | None]:
    """The GPUs that arms train on at once: all of the planned model, where the recipe names none and a run takes one."""
    if recipe.gpu != AUTO or recipe.launch.num_processes > 1 or plan.card.is_cpu:
        return [None]
    cards = alike_cards(plan.card.name)
    return [*cards] if len(cards) > 1 else [None]


def _arm_recipe(recipe: Recipe, path: Path | None, card: str | None = None) -> Recipe:
    """The recipe of an arm: evaluations also where the recipe has none."""
    changes: dict[str, Any] = {}
    if recipe.eval_steps == 0:
        changes["eval_steps"] = AUTO
    if path is not None:
        changes["output_dir"] = str(path)
    if card is not None:
        changes["gpu"] = card
    return recipe.model_copy(update=changes)


def _prepared(
    recipe_of: Callable[[dict[str, Any]], Recipe],
    values: list[dict[str, Any]],
    path: Path,
    cards: list[str | None],
    progress: Progress,
) -> tuple[list[tuple[str, dict[str, Any], Prepared]], list[LeftOut]]:
    from finetune.run.prepare import prepare

    prepared: list[tuple[str, dict[str, Any], Prepared]] = []
    left_out: list[LeftOut] = []
    for number, arm_values in enumerate(values, 1):
        name = f"{path.name}-{number}"
        card = cards[len(prepared) % len(cards)]
        progress(f"planning {label(arm_values)}")
        try:
            prepared.append((name, arm_values, prepare(_arm_recipe(recipe_of(arm_values), path / name, card))))
        except DoesNotFit as error:
            left_out.append(LeftOut(arm_values, error.problems[0]))
    return prepared, left_out


def _most_seconds(seconds: RunSeconds, arms: int, rungs: list[int], cards: int) -> float:
    """What a sweep takes at most, about: after each comparison at least the best arm, its neighbours and half train on."""
    total_s, alive, previous = 0.0, arms, 0
    for rung in rungs:
        total_s += math.ceil(alive / cards) * (seconds.load_s + seconds.train_s * (rung - previous) / rungs[-1])
        alive, previous = min(alive, max(3, -(-alive // 2))), rung
    return total_s


def _within(
    budget_s: float, seconds: RunSeconds | None, values: list[dict[str, Any]], swept: dict[str, list[Any]], cards: int
) -> tuple[list[dict[str, Any]], list[LeftOut]]:
    """The combinations in the middle of the grid that the budget allows. Raises CommandError where no step was measured."""
    if seconds is None:
        raise CommandError(
            "--budget needs a forecast of the time, and no step of such a run has been measured on this machine",
            "Run some steps of it first: finetune run RECIPE max_steps=10. Or leave out --budget.",
        )
    count = len(values)
    while count and _most_seconds(seconds, count, rungs_of(100), cards) > budget_s:
        count -= 1
    chosen = nearest_to_centre(values, swept, count)
    reason = f"{count} arms fit --budget {format_seconds(budget_s)} at {format_seconds(sum(seconds))} a run"
    return chosen, [LeftOut(combination, reason) for combination in values if combination not in chosen]


def _folder(recipe: Recipe, swept: dict[str, list[Any]]) -> Path:
    """`runs/<model>-sweep-<digest>`, or the recipe's output_dir; a number is added to a name that is taken."""
    if recipe.output_dir != AUTO:
        path = Path(recipe.output_dir)
    else:
        model = (
            re.sub(r"[^A-Za-z0-9._-]+", "-", recipe.model_name_or_path.rstrip("/").rpartition("/")[2]).strip("-.") or "model"
        )
        digest = hashlib.sha256(json.dumps([write_recipe(recipe), swept]).encode()).hexdigest()[:6]
        path = Path("runs") / f"{model}-sweep-{digest}"
    taken = [path, *(path.with_name(f"{path.name}-{number}") for number in range(2, 1000))]
    return next(candidate for candidate in taken if not candidate.exists())
