"""Sweeps: an Optuna study in a journal, whose trials are the arms, and a run directory per arm."""

from __future__ import annotations

import itertools
import math
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import optuna
from optuna.distributions import BaseDistribution, CategoricalDistribution
from optuna.storages import JournalStorage
from optuna.storages.journal import JournalFileBackend, JournalFileOpenLock
from optuna.trial import FrozenTrial, Trial, TrialState

from finetune.errors import CommandError, DataError, DoesNotFit, FinetuneError, OutOfMemory
from finetune.evaluate.results import Difference, difference
from finetune.files import to_json
from finetune.recipe import write_recipe
from finetune.run import control
from finetune.run.best import RowLosses, lowest_losses, read_row_losses
from finetune.run.directory import RunDirectory
from finetune.run.state import is_alive, read_state
from finetune.settings import AUTO, Recipe
from finetune.system import is_locked
from finetune.units import Progress, format_seconds

#: Files of a sweep: Optuna's study; lock of the process that trains the arms.
JOURNAL, LOCK = "study.journal", "lock"
_FULL_ARMS = 3  # arms that must have finished before the pruner drops any
RULE = (
    "From half of the steps on, an arm is dropped if its lowest held-out loss is above the median of the finished arms at that "
    f"step; the first {_FULL_ARMS} arms always train to the end."
)
_DROPPED = (TrialState.PRUNED, TrialState.FAIL)
_POLL_S = 0.2
_STOP_DEADLINE_S = 600.0  # seconds for the last step and the checkpoint of a stopped arm

optuna.logging.set_verbosity(optuna.logging.WARNING)


@dataclass(frozen=True)
class ArmResult:
    """Result of an arm so far."""

    name: str
    run: str
    values: dict[str, Any]
    state: str
    step: int | None
    dropped_at: int | None
    loss: float | None  # lowest held-out loss, and its step
    loss_step: int | None
    behind: Difference | None  # loss minus the winner's loss, where the row losses are known
    curve: list[tuple[int, float]]


@dataclass(frozen=True)
class Sweep:
    """A sweep on disk; its facts are the study's user attributes (docs/sweeps.md)."""

    path: Path
    study: optuna.Study

    @property
    def is_running(self) -> bool:
        return is_locked(self.path / LOCK)

    @property
    def is_finished(self) -> bool:
        return all(arm.state.is_finished() for arm in self.study.trials)

    def run_of(self, arm: FrozenTrial) -> RunDirectory:
        return RunDirectory(self.path / f"{self.study.study_name}-{arm.number + 1}")

    def results(self) -> list[ArmResult]:
        """Return every arm, by loss, dropped arms last."""
        arms = [(arm, read_row_losses(self.run_of(arm))) for arm in self.study.trials]
        winner = lowest_losses(losses for arm, curve in arms if arm.state not in _DROPPED for losses in curve)
        results = [_result(arm, self.run_of(arm), curve, winner) for arm, curve in arms]
        return sorted(results, key=lambda entry: (entry.dropped_at is not None, math.inf if entry.loss is None else entry.loss))

    def sentence(self, arm_name: Callable[[dict[str, Any]], str] | None = None) -> str:
        """Return the winner in words, and the arms that may be as good. `arm_name`: by default `label`."""
        arm_name = arm_name or label
        results = [entry for entry in self.results() if entry.loss is not None]
        if not results:
            return "no arm has a held-out loss yet"
        winner, verb = results[0], "wins" if self.is_finished else "leads"
        clauses = [
            f"{arm_name(winner.values)} {verb} with a held-out loss of {winner.loss:.4f} after step {winner.loss_step:,}"
        ]
        others = [(arm_name(entry.values), entry.behind) for entry in results[1:] if entry.dropped_at is None]
        if as_good := [name for name, behind in others if behind and not behind.is_significant]:
            clauses.append(f"can't be told apart from it: {', '.join(as_good)}")
        if not_compared := [name for name, behind in others if behind is None]:
            clauses.append(f"not compared row by row: {', '.join(not_compared)}")
        clearly_behind = [(name, behind) for name, behind in others if behind and behind.is_significant]
        for name, behind in clearly_behind[:1]:
            interval = f"95 % interval {behind.low:.4f} to {behind.high:.4f}"
            clauses.append(f"clearly behind: {name}, by {behind.value:.4f} ({interval})")
        return "; ".join(clauses)

    def as_json(self) -> dict[str, Any]:
        return {
            **self.study.user_attrs, "rule": RULE, "sweep": str(self.path), "running": self.is_running,
            "finished": self.is_finished, "arms": to_json(self.results()), "sentence": self.sentence(),
        }  # fmt: skip


def _result(arm: FrozenTrial, run: RunDirectory, curve: list[RowLosses], winner: RowLosses | None) -> ArmResult:
    state, best = read_state(run), lowest_losses(curve)
    dropped_at = (arm.last_step or state.step or 0) if arm.state in _DROPPED else None
    idle_state = "waiting" if dropped_at is None else "dropped"
    behind = None
    if best and winner and best is not winner and best.tokens == winner.tokens:
        behind = difference(winner.losses, best.losses, winner.tokens)
    return ArmResult(
        name=run.path.name, run=str(run.path), values=arm.params, step=state.step, dropped_at=dropped_at,
        state=idle_state if state.state in ("paused", "queued") else state.state,
        loss=best.mean if best else None, loss_step=best.step if best else None,
        behind=behind, curve=[(losses.step, losses.mean) for losses in curve],
    )  # fmt: skip


def open_sweep(path: Path) -> Sweep:
    """Return the sweep in a folder. Raises CommandError for a damaged journal."""
    try:
        study = optuna.load_study(study_name=None, storage=storage_in(path))
        if len(study.trials) != study.user_attrs["arms"]:
            raise ValueError("killed before every arm was written")
        # from half of the steps on: a high rate looks worse than it ends, until the schedule lowers the rate
        study.pruner = optuna.pruners.MedianPruner(_FULL_ARMS, n_warmup_steps=study.user_attrs["steps"] // 2)
    except (OSError, ValueError, LookupError, TypeError, AttributeError, AssertionError) as error:
        problem = f"{path / JOURNAL} can't be read: {getattr(error, 'strerror', '') or 'it is damaged'}"
        raise CommandError(problem, "Restore it, or start another: finetune sweep RECIPE. The arms are still runs.") from None
    return Sweep(path, study)


def storage_in(path: Path) -> JournalStorage:
    """Return Optuna's storage in a sweep's folder."""
    journal = str(path / JOURNAL)
    # Optuna's default lock is a symbolic link: Windows refuses links, and a killed process with a relative path leaves its link
    return JournalStorage(JournalFileBackend(journal, JournalFileOpenLock(journal)))


def label(values: dict[str, Any]) -> str:
    """Return `learning_rate=0.0002 lora_r=16`."""
    return " ".join(f"{name}={value}" for name, value in values.items())


def create_sweep(
    recipe_of: Callable[[dict[str, Any]], Recipe], swept: dict[str, list[Any]], *, progress: Progress = lambda _: None
) -> Sweep:
    """Plan and write the arms. Raises the errors of `prepare`, and CommandError for fewer than two arms."""
    from finetune.run.prepare import create_run, prepare

    def prepared(values: dict[str, Any], **changes: str) -> Any:
        recipe = recipe_of(values)
        if recipe.eval_steps == 0:  # arms are compared at evaluations
            recipe = recipe.model_copy(update={"eval_steps": AUTO})
        return prepare(recipe.model_copy(update=changes))

    if recipe_of({}).launch.num_processes > 1:
        raise CommandError("a sweep trains each arm in one process", "Leave out launch.num_processes.")
    progress("planning")
    plan = prepared({}).plan
    if not (plan.data and plan.data.eval_rows):
        raise DataError("a sweep compares held-out losses, but no examples are held out", "Add dataset.test_split_size=0.1.")
    # by default the learning rate is swept around the planner's advice
    swept = swept or {"learning_rate": rates_around(plan.settings.learning_rate)}
    base = plan.settings.output_dir + ("-sweep" if recipe_of({}).output_dir == AUTO else "")
    candidates = (Path(base if number == 1 else f"{base}-{number}") for number in itertools.count(1))
    path = next(path for path in candidates if not path.exists())
    step_s = plan.forecast.step_s if plan.forecast else None
    run_s = step_s * plan.total_steps if step_s and plan.total_steps else None
    left_out: list[dict[str, Any]] = []
    fitting: list[tuple[Trial, Any]] = []
    for arm in grid(swept):
        progress(f"planning {label(arm.params)}")
        try:
            fitting.append((arm, prepared(arm.params, output_dir=str(path / f"{path.name}-{len(fitting) + 1}"))))
        except DoesNotFit as error:
            left_out.append({"values": arm.params, "reason": error.problems[0]})
    if len(fitting) < 2:  # noqa: PLR2004 - a comparison needs two
        reasons = [f"{label(entry['values'])}: {entry['reason']}" for entry in left_out]
        raise CommandError([f"{len(fitting)} arm is left to compare", *reasons], "Give more values.")
    steps = {run.plan.total_steps for _, run in fitting}
    if len(steps) > 1:
        raise CommandError(f"the arms have different numbers of steps: {sorted(steps)}", "Set the same max_steps for all arms.")
    progress("writing the arms")
    facts = {
        "arms": len(fitting), "recipe": write_recipe(recipe_of({})), "swept": swept, "left_out": left_out, "steps": steps.pop(),
        "forecast_s": run_s and run_s * len(fitting),
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
    # half a decade apart, a decade to both sides
    rates = [advice * factor for factor in (0.1, 10**-0.5, 1.0, 10**0.5, 10.0)]
    return [float(f"{rate:.1e}") for rate in rates if rate < 1]


def grid(swept: dict[str, list[Any]]) -> list[Trial]:
    """Return every combination of values as a trial, the middle first."""
    study = optuna.create_study(sampler=optuna.samplers.GridSampler(swept))
    choices: dict[str, BaseDistribution] = {name: CategoricalDistribution(values) for name, values in swept.items()}

    def distance(arm: Trial) -> float:
        return sum(abs(swept[name].index(value) - (len(swept[name]) - 1) / 2) for name, value in arm.params.items())

    arms = [study.ask(choices) for _ in range(math.prod(map(len, swept.values())))]
    return sorted(arms, key=distance)  # Optuna's pruner compares later arms with the first arms


def train_arms(sweep: Sweep, log: Callable[[str], object]) -> None:
    """Train the arms that have not ended. Raises OSError and FinetuneError."""
    # all state is in the study and the run directories: a killed sweep can go on
    for arm in sweep.study.trials:
        if arm.state.is_finished():
            continue
        run, began_s = sweep.run_of(arm), time.monotonic()
        try:
            if not is_alive(run) and not _has_result(run):
                log(f"{label(arm.params)}: training  ({run.path})")
                begin = control.start if read_state(run).state == "queued" else control.resume
                begin(run)
            # trial ids are arm numbers in a journal's only study
            outcome = _wait_for_end(sweep, Trial(sweep.study, arm.number), run)
        except KeyboardInterrupt:
            log("stopping after this step, with a checkpoint")
            raise
        finally:  # a dropped arm, or a stopped sweep
            control.stop(run)
            control.wait(run, _STOP_DEADLINE_S)
        log(f"{label(arm.params)}: {outcome} ({format_seconds(time.monotonic() - began_s)})")


def _wait_for_end(sweep: Sweep, trial: Trial, run: RunDirectory) -> str:
    has_ended = False
    while not has_ended:
        # before the losses are read: an arm writes its losses before it ends
        has_ended = read_state(run).ended and not is_alive(run)
        reported = sweep.study.trials[trial.number].intermediate_values
        for losses in read_row_losses(run):
            if losses.step not in reported and losses.step < sweep.study.user_attrs["steps"]:
                trial.report(losses.mean, losses.step)
            if trial.should_prune():  # after each loss: the outcome must not depend on the time of reading
                sweep.study.tell(trial, state=TrialState.PRUNED)
                return f"dropped at step {sweep.study.trials[trial.number].last_step:,}"
        time.sleep(_POLL_S)
    state, best = read_state(run), lowest_losses(read_row_losses(run))
    if not _has_result(run):
        raise FinetuneError(f"{run.path} {state.state}: {state.message}", f"To continue: finetune sweep {sweep.path}")
    if state.state != "finished" or best is None:
        sweep.study.tell(trial, state=TrialState.FAIL)
        return f"{state.state} at step {state.step or 0:,}: {state.message}"
    sweep.study.tell(trial, best.mean)
    return f"finished, held-out loss {best.mean:.4f}"


def _has_result(run: RunDirectory) -> bool:
    state = read_state(run)
    # an arm without a result can be resumed; out of memory is final: no smaller plan was left
    return state.state in ("finished", "diverged") or (state.state == "failed" and state.exit_code == OutOfMemory.exit_code)
