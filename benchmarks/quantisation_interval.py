"""How often the interval of a quantisation's cost covers the true cost: python benchmarks/quantisation_interval.py [DRAWS]

A population of rows has log-normal numbers of trained tokens and gamma-distributed losses. Quantising changes a row's loss by a
mean, by a share of the loss, and by Student's t noise with 4 degrees of freedom that shrinks with the row's length. Each draw
measures some rows with `finetune.evaluate.paired.difference`, as finetune/evaluate/quantisation.py does.
"""

from __future__ import annotations

import sys

import numpy as np

from finetune.evaluate.paired import difference

POPULATION = 200_000
#: Mean of a row's cost, and share of its loss: of NF4 on a model that it hurts, and of int8, which hardly costs anything.
COSTS = {"NF4": (0.010, 0.004), "int8": (0.0003, 0.0)}
ROWS = (30, 60, 120, 500)


def covered_share(mean: float, share: float, rows: int, draws: int, seed: int = 0) -> float:
    """Share of the draws whose interval has the population's cost per token."""
    rng = np.random.default_rng(seed)
    tokens = np.maximum(2, rng.lognormal(4.0, 0.8, POPULATION)).round()
    plain = rng.gamma(4.0, 0.4, POPULATION)
    noise = rng.standard_t(4, POPULATION) * 0.15 / np.sqrt(tokens)
    quantised = plain + mean + share * plain + noise
    truth = float(np.average(quantised - plain, weights=tokens))
    covered = 0
    for _ in range(draws):
        chosen = rng.integers(POPULATION, size=rows)
        interval = difference(plain[chosen], quantised[chosen], tokens[chosen])
        covered += interval.low <= truth <= interval.high
    return covered / draws


def main() -> None:
    """Print a line for each format and number of rows."""
    draws = int(sys.argv[1]) if len(sys.argv) > 1 else 400
    for label, (mean, share) in COSTS.items():
        for rows in ROWS:
            print(
                f"{label:5} {rows:4} rows: {100 * covered_share(mean, share, rows, draws):.1f} of 100 intervals cover the cost"
            )


if __name__ == "__main__":
    main()
