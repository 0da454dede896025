"""How often a sweep's rule keeps its best arm: python benchmarks/sweep_halving.py [SWEEPS]

Five learning rates, half a decade apart, train on a noisy quadratic (Zhang et al. 2019) with this project's schedule, warm-up
and cosine. In every direction the loss falls by (1 - rate x curvature)^2 a step and gradient noise adds rate^2 x curvature;
curvatures follow a power law. So high rates look worse before the schedule ends than after it (short-horizon bias, Wu et al.
2018), and the highest ones diverge. Power, noise, and how far the best rate is from the grid's middle are drawn at random for
each sweep; held-out rows have a difficulty each, and noise at every evaluation. The best arm has the lowest true loss at the
end; it is kept when it is among the finalists.
"""

from __future__ import annotations

import sys
from collections.abc import Callable

import numpy as np

from finetune.sweep.grid import RATE_FACTORS
from finetune.sweep.halving import RowLosses, dropped, rungs_of

STEPS, DIRECTIONS, ROWS, WARMUP = 200, 60, 100, 6
#: Losses are cut here: what diverges.
MOST_LOSS = 20.0
Rule = Callable[[list[RowLosses | None], Callable[[int, int], bool]], list[int]]


def true_losses(rng: np.random.Generator) -> tuple[np.ndarray, float]:
    """The expected held-out loss of every arm at every step, and the loss that no training goes below."""
    curvature = np.arange(1, DIRECTIONS + 1.0) ** -rng.uniform(0.8, 1.4)
    noise, advice = 10 ** rng.uniform(-2.0, 0.5), 10 ** rng.uniform(-1.0, 0.3)
    steps = np.arange(STEPS)
    cosine = 0.5 * (1 + np.cos(np.pi * (steps - WARMUP) / (STEPS - WARMUP)))
    schedule = np.where(steps < WARMUP, (steps + 1) / WARMUP, cosine)
    losses = np.empty((len(RATE_FACTORS), STEPS))
    for arm, factor in enumerate(RATE_FACTORS):
        squared = np.ones(DIRECTIONS)
        for step, share in enumerate(schedule):
            rate = advice * factor * share
            squared = np.minimum((1 - rate * curvature) ** 2 * squared + rate**2 * curvature * noise, 1e9)
            losses[arm, step] = 0.5 * (curvature * squared).sum()
    floor = rng.uniform(0.3, 1.5)
    return np.minimum(losses / losses[len(RATE_FACTORS) // 2, 0] * 1.5 + floor, MOST_LOSS), floor


def keeps_best(rng: np.random.Generator, rule: Rule = dropped) -> tuple[bool, float]:
    """Whether one sweep's best arm is a finalist, and the share of all arms' steps that the sweep trains."""
    losses, floor = true_losses(rng)
    difficulty = rng.gamma(4, 0.25, ROWS)
    tokens = tuple(np.maximum(2, rng.lognormal(3.5, 0.7, ROWS)).round().astype(int).tolist())
    alive, trained, previous = list(range(len(RATE_FACTORS))), 0, 0
    for rung in rungs_of(STEPS):
        trained += len(alive) * (rung - previous)
        previous = rung
        if rung == STEPS:
            break
        arms = list(alive)
        results: list[RowLosses | None] = [
            _measured(rng, losses[arm, rung - 1], floor, difficulty, tokens, rung) for arm in arms
        ]
        behind = rule(results, lambda first, second, arms=arms: abs(arms[first] - arms[second]) == 1)
        alive = [arm for index, arm in enumerate(arms) if index not in behind]
    return int(np.argmin(losses[:, -1])) in alive, trained / (len(RATE_FACTORS) * STEPS)


def _measured(
    rng: np.random.Generator, loss: float, floor: float, difficulty: np.ndarray, tokens: tuple[int, ...], step: int
) -> RowLosses:
    """Rows' losses: what can't be learnt by its difficulty, the rest unevenly; a seed's noise is in all rows."""
    rows = floor * difficulty + (loss - floor) * rng.gamma(4, 0.25, ROWS) + rng.normal(0, 0.05, ROWS) + rng.normal(0, 0.01)
    return RowLosses(step, float(np.average(rows, weights=tokens)), tuple(rows.tolist()), tokens)


def plain_halving(results: list[RowLosses | None], _: Callable[[int, int], bool]) -> list[int]:
    """The worse half, always: for comparison."""
    ordered = sorted(range(len(results)), key=lambda index: results[index].mean)  # type: ignore[union-attr]
    return ordered[-(-len(ordered) // 2) :]


def main() -> None:
    """Print a line for each rule."""
    sweeps = int(sys.argv[1]) if len(sys.argv) > 1 else 200
    for name, rule in (("this project's rule", dropped), ("the worse half is dropped", plain_halving)):
        rng = np.random.default_rng(0)
        outcomes = [keeps_best(rng, rule) for _ in range(sweeps)]
        survived, steps = (float(np.mean([outcome[part] for outcome in outcomes])) for part in (0, 1))
        print(f"{name}: the best arm is a finalist in {100 * survived:.1f} of 100 sweeps, which train {steps:.0%} of all steps")


if __name__ == "__main__":
    main()
