"""Sweep folder: Optuna's study in a journal, whose trials are the arms, and a run directory per arm."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import optuna
from optuna.storages import JournalStorage
from optuna.storages.journal import JournalFileBackend, JournalFileOpenLock
from optuna.trial import FrozenTrial, TrialState

from finetune.errors import CommandError
from finetune.evaluate.paired import Difference, difference
from finetune.run.directory import RunDirectory
from finetune.run.held_out import RowLosses, lowest, row_losses_of
from finetune.run.state import read_state
from finetune.serialise import to_json
from finetune.system import is_locked

#: Files of a sweep: Optuna's study; output and lock of the driving process; request to stop.
JOURNAL, LOG, LOCK, STOP = "study.journal", "log.txt", "lock", "stop"
_FULL_ARMS = 3
RULE = (
    "From half of the steps on, an arm is dropped if its lowest held-out loss is above the median of the finished arms at that "
    f"step; the first {_FULL_ARMS} arms always train to the end."
)
_DROPPED = (TrialState.PRUNED, TrialState.FAIL)

optuna.logging.set_verbosity(optuna.logging.WARNING)


@dataclass(frozen=True)
class ArmResult:
    """Result of an arm."""

    name: str
    run: str
    values: dict[str, Any]
    state: str
    step: int | None
    dropped_at: int | None
    #: Lowest held-out loss, and its step.
    loss: float | None
    loss_step: int | None
    #: Loss minus the winner's loss, where the row losses are known.
    behind: Difference | None
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
        arms = [(arm, row_losses_of(self.run_of(arm))) for arm in self.study.trials]
        winner = lowest(losses for arm, curve in arms if arm.state not in _DROPPED for losses in curve)
        results = [_result(arm, self.run_of(arm), curve, winner) for arm, curve in arms]
        return sorted(results, key=lambda entry: (entry.dropped_at is not None, math.inf if entry.loss is None else entry.loss))

    def sentence(self, named: Callable[[dict[str, Any]], str] | None = None) -> str:
        """Return the winner in words, and the arms that may be as good."""
        named = named or label
        results = [entry for entry in self.results() if entry.loss is not None]
        if not results:
            return "no arm has a held-out loss yet"
        winner, verb = results[0], "wins" if self.is_finished else "leads"
        trained = [(named(entry.values), entry.behind) for entry in results[1:] if entry.dropped_at is None]
        surely = [
            f"{name}, by {behind.value:.4f} (95 % interval {behind.low:.4f} to {behind.high:.4f})"
            for name, behind in trained if behind and behind.is_significant
        ]  # fmt: skip
        parts = {
            "can't be told apart from it": [name for name, behind in trained if behind and not behind.is_significant],
            "not compared row by row": [name for name, behind in trained if behind is None],
            "clearly behind": surely[:1],
        }
        first = f"{named(winner.values)} {verb} with a held-out loss of {winner.loss:.4f} after step {winner.loss_step:,}"
        return "; ".join([first, *(f"{text}: {', '.join(names)}" for text, names in parts.items() if names)])

    def as_json(self) -> dict[str, Any]:
        return {
            **self.study.user_attrs, "rule": RULE, "sweep": str(self.path), "running": self.is_running,
            "finished": self.is_finished, "arms": to_json(self.results()), "sentence": self.sentence(),
        }  # fmt: skip


def _result(arm: FrozenTrial, run: RunDirectory, curve: list[RowLosses], winner: RowLosses | None) -> ArmResult:
    state, best = read_state(run), lowest(curve)
    dropped_at = (arm.last_step or state.step or 0) if arm.state in _DROPPED else None
    waits = "waiting" if dropped_at is None else "dropped"
    behind = None
    if best and winner and best is not winner and best.tokens == winner.tokens:
        behind = difference(winner.losses, best.losses, winner.tokens)
    return ArmResult(
        name=run.path.name, run=str(run.path), values=arm.params, step=state.step, dropped_at=dropped_at,
        state=waits if state.state in ("paused", "queued") else state.state,
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
