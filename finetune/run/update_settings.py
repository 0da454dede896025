"""Update a resumed run's settings that do not affect its result, and the place of its base model."""

from __future__ import annotations

from typing import Any

from finetune.errors import RecipeError
from finetune.planner.plan import read_plan
from finetune.recipe import load_changes, recipe_from
from finetune.run.directory import RunDirectory
from finetune.run.fingerprint import find_base
from finetune.run.retry import adjust
from finetune.settings.schema import AUTO, Decides, decided_by

#: Settings that do not affect the result, but are fixed once a run exists.
_FIXED = {"output_dir", "memory_budget", "host_memory", "launch", "gpu"}
#: They choose among the steps and change none of them.
_CHOOSE = {"eval_steps", "early_stopping_patience"}
_SCHEDULE = "the learning rate of all steps so far was for the old end"
_WHY = {"max_steps": _SCHEDULE, "num_train_epochs": _SCHEDULE}


def update_settings(run: RunDirectory, overrides: list[str]) -> dict[str, Any]:
    """Save `key=value` changes for a run's next attempts and return them. Raises RecipeError with every one that can't be."""
    changes = load_changes(overrides)
    base = changes.pop("model_name_or_path", None)
    fix = f"Start a new run: finetune run {run.recipe} {' '.join(overrides)}"
    problems = []
    for name, value in changes.items():
        if name in _FIXED:
            problems.append(f"{name} can't change: the run directory and the plan exist")
        elif name not in _CHOOSE and decided_by(name) & ~(Decides.BYTES | Decides.SPEED):
            problems.append(f"{name} would change what is learnt: {_WHY.get(name, 'the steps so far had another value')}")
        elif value == AUTO:
            problems.append(f"{name}=auto: the plan is made; give a value")
    if problems:
        raise RecipeError(problems, fix)
    if base is not None:
        find_base(run, str(base))
    settings = read_plan(run.plan).settings
    recipe = recipe_from({**settings.model_dump(exclude_unset=True, mode="json"), **changes})
    typed = {name: recipe.model_dump(mode="json")[name] for name in changes}
    if typed:
        adjust(run, typed)
    return typed if base is None else {"model_name_or_path": base, **typed}
