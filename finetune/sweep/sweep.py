"""A sweep's folder: sweep.json and a run directory for each arm. Which arms train on follows from the arms' own files."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from finetune.errors import CommandError, OutOfMemory
from finetune.evaluate.paired import Difference
from finetune.files import read_json, read_object, write_json
from finetune.run.directory import RunDirectory
from finetune.run.state import RunState, read_state
from finetune.serialise import from_json, to_json
from finetune.sweep.grid import are_neighbours
from finetune.sweep.halving import RowLosses, dropped, gap
from finetune.system import is_locked

VERSION = 1


@dataclass(frozen=True)
class ArmFacts:
    """An arm: name of its run directory in the sweep's folder, and its values of the swept settings.

    `card`: index of the GPU that it trains on, where the sweep uses several.
    """

    name: str
    values: dict[str, Any]
    card: str | None = None


@dataclass(frozen=True)
class LeftOut:
    """Values that are not trained with, and why."""

    values: dict[str, Any]
    reason: str


@dataclass(frozen=True)
class SweepFacts:
    """Contents of sweep.json.

    `swept`: values of each setting; `rungs`: steps at which arms are compared, the last one included; `budget_s`: what --budget
    allows; `forecast_s`: of the whole sweep, None where no step has been measured here.
    """

    recipe: str
    swept: dict[str, list[Any]]
    arms: tuple[ArmFacts, ...]
    rungs: tuple[int, ...]
    rule: str
    left_out: tuple[LeftOut, ...] = ()
    budget_s: float | None = None
    forecast_s: float | None = None
    version: int = VERSION


@dataclass(frozen=True)
class ArmResult:
    """How an arm went. `dropped_at`: step of the comparison that dropped it; `loss`: lowest held-out loss so far, after
    `loss_step`; `behind`: its loss minus the winner's, with an interval, None of the winner and where rows are unknown."""

    name: str
    run: str
    values: dict[str, Any]
    state: str
    step: int | None
    dropped_at: int | None = None
    loss: float | None = None
    loss_step: int | None = None
    behind: Difference | None = None
    curve: list[tuple[int, float]] = field(default_factory=list)


@dataclass(frozen=True)
class Sweep:
    """A sweep on disk."""

    path: Path
    facts: SweepFacts

    @property
    def lock(self) -> Path:
        """Locked while a process drives the sweep."""
        return self.path / "lock"

    @property
    def log(self) -> Path:
        """What that process has done, a line each."""
        return self.path / "log.txt"

    @property
    def stop_request(self) -> Path:
        """Is there when somebody has asked it to stop."""
        return self.path / "stop"

    @property
    def is_running(self) -> bool:
        """Whether a process drives it."""
        return is_locked(self.lock)

    def run_of(self, arm: ArmFacts) -> RunDirectory:
        return RunDirectory(self.path / arm.name)

    def survivors(self) -> tuple[list[ArmFacts], int, dict[str, int]]:
        """The arms that train on, the rung they train to, and the step at which each other arm was dropped.

        The last rung where every comparison is made; a rung is compared when each of its arms has its losses or has failed.
        """
        alive, dropped_at = list(self.facts.arms), dict[str, int]()
        for rung in self.facts.rungs[:-1]:
            if not all(self.has_reached(arm, rung) for arm in alive):
                return alive, rung, dropped_at
            results = [self.losses_at(arm, rung) for arm in alive]
            behind = dropped(results, self._neighbours_of(alive))
            dropped_at |= {alive[index].name: rung for index in behind}
            alive = [arm for index, arm in enumerate(alive) if index not in behind]
        return alive, self.facts.rungs[-1], dropped_at

    def _neighbours_of(self, arms: list[ArmFacts]) -> Callable[[int, int], bool]:
        return lambda first, second: are_neighbours(arms[first].values, arms[second].values, self.facts.swept)

    def has_reached(self, arm: ArmFacts, rung: int) -> bool:
        """Whether the arm has trained to this step and was evaluated there, or has ended for good."""
        run = self.run_of(arm)
        state = read_state(run)
        if state.state == "finished" or can_not_train(state):
            return True
        return rung < self.facts.rungs[-1] and any(losses.step >= rung for losses in row_losses_of(run))

    def losses_at(self, arm: ArmFacts, step: int) -> RowLosses | None:
        """The arm's newest held-out losses up to a step; None of an arm that has diverged or failed before."""
        run = self.run_of(arm)
        until = [losses for losses in row_losses_of(run) if losses.step <= step]
        state = read_state(run)
        ended_before = can_not_train(state) and (state.step or 0) < step
        return None if ended_before or not until or not math.isfinite(until[-1].mean) else until[-1]

    def results(self) -> list[ArmResult]:
        """Every arm, the winner first, then by loss; those without one are last."""
        alive, _, dropped_at = self.survivors()
        names = {arm.name for arm in alive}
        best = {arm.name: _best(self.run_of(arm)) for arm in self.facts.arms}
        finalists = [(losses.mean, name) for name in names if (losses := best[name]) is not None]
        winner = best[min(finalists)[1]] if finalists else None

        def result(arm: ArmFacts) -> ArmResult:
            run, losses = self.run_of(arm), best[arm.name]
            state = read_state(run)
            behind = gap(winner, losses) if winner and losses and losses is not winner else None
            curve = [(entry.step, entry.mean) for entry in row_losses_of(run)]
            state_name = _state_name(state, arm.name in names)
            return ArmResult(
                arm.name, str(run.path), arm.values, state_name, state.step, dropped_at.get(arm.name),
                losses.mean if losses else None, losses.step if losses else None, behind, curve,
            )  # fmt: skip

        def order(entry: ArmResult) -> tuple[bool, float]:
            return entry.name not in names, math.inf if entry.loss is None else entry.loss

        return sorted(map(result, self.facts.arms), key=order)

    @property
    def is_finished(self) -> bool:
        """Whether every arm that was not dropped has ended."""
        alive, rung, _ = self.survivors()
        return rung == self.facts.rungs[-1] and all(self.has_reached(arm, rung) for arm in alive)

    def sentence(self, named: Callable[[dict[str, Any]], str] | None = None) -> str:
        """The winner in words, and which arms can't be told from it; `named`: an arm's values as text, else as `label`."""
        named = named or label
        results = [entry for entry in self.results() if entry.loss is not None]
        if not results:
            return "no arm has a held-out loss yet"
        winner, *others = results
        verb = "wins" if self.is_finished else "leads"
        text = f"{named(winner.values)} {verb} with a held-out loss of {winner.loss:.4f} after step {winner.loss_step:,}"
        trained = [entry for entry in others if entry.dropped_at is None]
        unknown = [entry for entry in trained if entry.behind is None]
        close = [entry for entry in trained if entry.behind is not None and not entry.behind.is_significant]
        for entries, text_of_entries in ((close, "can't be told apart from it"), (unknown, "not compared row by row")):
            if entries:
                text += f"; {text_of_entries}: {', '.join(named(entry.values) for entry in entries)}"
        surely = [entry for entry in trained if entry.behind is not None and entry.behind.is_significant]
        if surely:
            nearest = min(surely, key=lambda entry: entry.loss or math.inf)
            assert nearest.behind is not None
            text += (
                f"; surely behind: {named(nearest.values)}, by {nearest.behind.value:.4f} "
                f"(95 % interval {nearest.behind.low:.4f} to {nearest.behind.high:.4f})"
            )
        return text

    def as_json(self) -> dict[str, Any]:
        """As documented in docs/sweeps.md."""
        return {
            **to_json(self.facts), "sweep": str(self.path), "running": self.is_running, "finished": self.is_finished,
            "arms": to_json(self.results()), "sentence": self.sentence(),
        }  # fmt: skip


def can_not_train(state: RunState) -> bool:
    """Whether an arm has ended for good: it diverged, or ran out of memory with no smaller plan left. Others can be resumed."""
    return state.state == "diverged" or (state.state == "failed" and state.exit_code == OutOfMemory.exit_code)


def label(values: dict[str, Any]) -> str:
    """`learning_rate=0.0002 lora_r=16`."""
    return " ".join(f"{name}={value}" for name, value in values.items())


def is_sweep(path: Path) -> bool:
    """Whether a folder is a sweep's."""
    return (path / "sweep.json").is_file()


def open_sweep(path: Path) -> Sweep:
    """The sweep in a folder. Raises CommandError when there is none, or it is damaged."""
    try:
        return Sweep(path, from_json(SweepFacts, read_json(path / "sweep.json", dict)))
    except (OSError, ValueError) as error:
        raise CommandError(f"{path / 'sweep.json'} can't be read: {error}", "Start a sweep: finetune sweep RECIPE") from None


def write_sweep(sweep: Sweep) -> None:
    """Write sweep.json: from now on the folder is a sweep's. Raises OSError."""
    write_json(sweep.path / "sweep.json", to_json(sweep.facts))


def row_losses_of(run: RunDirectory) -> list[RowLosses]:
    """The held-out losses that an arm has kept, by step; a file that is being written is left out."""
    entries = []
    for path in (run.path / "evaluations").glob("held-out-*.json"):
        if values := read_object(path):
            step, mean = int(path.stem.rpartition("-")[2]), float("nan") if values["mean"] is None else values["mean"]
            entries.append(RowLosses(step, mean, tuple(values["losses"]), tuple(values["tokens"])))
    return sorted(entries, key=lambda entry: entry.step)


def _best(run: RunDirectory) -> RowLosses | None:
    finite = [entry for entry in row_losses_of(run) if math.isfinite(entry.mean)]
    return min(finite, key=lambda entry: entry.mean, default=None)


def _state_name(state: RunState, alive: bool) -> str:
    """`dropped` of an arm that its sweep has stopped, `waiting` of one that it will train on, else the run's state."""
    stopped = state.state in ("stopped", "queued")
    return state.state if not stopped else "waiting" if alive else "dropped"
