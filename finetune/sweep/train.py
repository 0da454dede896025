"""Create a sweep, and train its arms one after another."""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import optuna
from optuna.distributions import BaseDistribution, CategoricalDistribution
from optuna.trial import Trial, TrialState

from finetune.errors import CommandError, DataError, DoesNotFit, FinetuneError, OutOfMemory
from finetune.printable import Progress
from finetune.recipe import write_recipe
from finetune.run import control
from finetune.run.directory import RunDirectory
from finetune.run.held_out import lowest, row_losses_of
from finetune.run.state import is_alive, read_state
from finetune.settings import AUTO, Recipe
from finetune.sweep.sweep import STOP, Sweep, label, open_sweep, storage_in
from finetune.units import format_seconds

#: Factors of the planner's learning rate: half a decade apart, a decade to both sides.
_RATE_FACTORS = (0.1, 10**-0.5, 1.0, 10**0.5, 10.0)
_POLL_S = 0.2
#: Seconds for the last step and the checkpoint of a stopped arm.
_STOP_DEADLINE_S = 600.0


def create_sweep(
    recipe_of: Callable[[dict[str, Any]], Recipe], swept: dict[str, list[Any]], *, budget_s: float | None = None,
    progress: Progress = lambda _: None,
) -> Sweep:  # fmt: skip
    """Plan and write the arms. Raises the errors of `prepare`, and CommandError for fewer than two arms."""
    from finetune.run.prepare import create_run, prepare

    def prepared(values: dict[str, Any], **changes: str) -> Any:
        recipe = recipe_of(values)
        evaluations = {"eval_steps": AUTO} if recipe.eval_steps == 0 else {}
        return prepare(recipe.model_copy(update={**evaluations, **changes}))

    if recipe_of({}).launch.num_processes > 1:
        raise CommandError("a sweep trains each arm in one process", "Leave out launch.num_processes.")
    progress("planning")
    plain = prepared({}).plan
    if not (plain.data and plain.data.eval_rows):
        raise DataError("a sweep compares held-out losses, but no examples are held out", "Add dataset.test_split_size=0.1.")
    # by default the learning rate is swept around the planner's advice
    swept = swept or {"learning_rate": rates_around(plain.settings.learning_rate)}
    base = plain.settings.output_dir + ("-sweep" if recipe_of({}).output_dir == AUTO else "")
    path = next(path for end in ("", *(f"-{n}" for n in range(2, 1000))) if not (path := Path(base + end)).exists())
    run_s, arms = plain.run_time and plain.run_time.load_s + plain.run_time.train_s, grid(swept)
    if budget_s and not run_s:
        raise CommandError(
            "--budget needs a time forecast, but no such run has been measured on this machine",
            "Run some steps of it first: finetune run RECIPE max_steps=10. Or leave out --budget.",
        )
    affordable = int(budget_s // run_s) if budget_s and run_s else len(arms)
    left_out: list[dict[str, Any]] = [
        {"values": arm.params, "reason": f"only {affordable} arms fit the budget"} for arm in arms[affordable:]
    ]
    fitting: list[tuple[Trial, Any]] = []
    for arm in arms[:affordable]:
        progress(f"planning {label(arm.params)}")
        try:
            fitting.append((arm, prepared(arm.params, output_dir=str(path / f"{path.name}-{len(fitting) + 1}"))))
        except DoesNotFit as error:
            left_out.append({"values": arm.params, "reason": error.problems[0]})
    if len(fitting) < 2:  # noqa: PLR2004 - a comparison needs two
        reasons = [f"{label(entry['values'])}: {entry['reason']}" for entry in left_out]
        raise CommandError([f"{len(fitting)} arm is left to compare", *reasons], "Give more values, or a longer --budget.")
    steps = {run.plan.total_steps for _, run in fitting}
    if len(steps) > 1:
        raise CommandError(f"the arms have different numbers of steps: {sorted(steps)}", "Set the same max_steps for all arms.")
    progress("writing the arms")
    facts = {
        "arms": len(fitting), "recipe": write_recipe(recipe_of({})), "swept": swept, "left_out": left_out, "steps": steps.pop(),
        "budget_s": budget_s, "forecast_s": run_s and run_s * len(fitting),
    }  # fmt: skip
    for _, run in fitting:
        create_run(run).arm.touch()
    # last: `open_sweep` compares the number of trials with the facts
    study = optuna.create_study(storage=storage_in(path), study_name=path.name)
    for name, value in facts.items():
        study.set_user_attr(name, value)
    study.add_trials(arm.study.trials[arm.number] for arm, _ in fitting)
    return open_sweep(path)


def rates_around(advice: float) -> list[float]:
    """Return learning rates around the planner's advice, with two significant digits."""
    return [float(f"{advice * factor:.1e}") for factor in _RATE_FACTORS if advice * factor < 1]


def grid(swept: dict[str, list[Any]]) -> list[Trial]:
    """Return every combination of values, the middle first."""
    study = optuna.create_study(sampler=optuna.samplers.GridSampler(swept))
    choices: dict[str, BaseDistribution] = {name: CategoricalDistribution(values) for name, values in swept.items()}

    def distance(arm: Trial) -> float:
        return sum(abs(swept[name].index(value) - (len(swept[name]) - 1) / 2) for name, value in arm.params.items())

    # Optuna's pruner compares later arms with the first arms
    return sorted((study.ask(choices) for _ in range(math.prod(map(len, swept.values())))), key=distance)


def drive(sweep: Sweep, log: Callable[[str], object]) -> None:
    """Train the arms that have not ended. Raises OSError and FinetuneError."""
    # all state is in the study and the run directories: a killed sweep can go on
    for arm in sweep.study.trials:
        if arm.state.is_finished():
            continue
        run, began_s = sweep.run_of(arm), time.monotonic()
        if not is_alive(run) and not _has_result(run):
            log(f"{label(arm.params)}: training  ({run.path})")
            (control.start if read_state(run).state == "queued" else control.resume)(run)
        try:
            outcome = _follow(sweep, Trial(sweep.study, arm.number), run)  # trial ids are arm numbers in a journal's only study
        finally:  # a dropped arm, or a stopped sweep
            control.stop(run)
            control.wait(run, _STOP_DEADLINE_S)
        log(f"{label(arm.params)}: {outcome} ({format_seconds(time.monotonic() - began_s)})")


def _follow(sweep: Sweep, trial: Trial, run: RunDirectory) -> str:
    has_ended = False
    while not has_ended:
        # before the losses are read: an arm writes its losses before it ends
        has_ended = read_state(run).ended and not is_alive(run)
        reported = sweep.study.trials[trial.number].intermediate_values
        for losses in row_losses_of(run):
            if losses.step not in reported and losses.step < sweep.study.user_attrs["steps"]:
                trial.report(losses.mean, losses.step)
            if trial.should_prune():  # after each loss: the outcome must not depend on the time of reading
                sweep.study.tell(trial, state=TrialState.PRUNED)
                return f"dropped at step {sweep.study.trials[trial.number].last_step:,}"
        if (sweep.path / STOP).exists() and not has_ended:
            raise FinetuneError("on request")
        time.sleep(_POLL_S)
    state, best = read_state(run), lowest(row_losses_of(run))
    if not _has_result(run):
        raise FinetuneError(f"{run.path} {state.state}: {state.message}")
    if state.state != "finished" or best is None:
        sweep.study.tell(trial, state=TrialState.FAIL)
        return f"{state.state} at step {state.step or 0:,}: {state.message}"
    sweep.study.tell(trial, best.mean)
    return f"finished, held-out loss {best.mean:.4f}"


def _has_result(run: RunDirectory) -> bool:
    state = read_state(run)
    # an arm without a result can be resumed; out of memory is final: no smaller plan was left
    return state.state in ("finished", "diverged") or (state.state == "failed" and state.exit_code == OutOfMemory.exit_code)
