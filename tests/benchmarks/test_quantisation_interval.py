"""The interval of what quantising costs, on simulated rows."""

import pytest

from benchmarks.quantisation_interval import COSTS, covered_share


@pytest.mark.exhaustive
@pytest.mark.parametrize("label", COSTS)
def test_the_interval_covers_the_true_cost_in_93_of_100_draws(label):
    assert covered_share(*COSTS[label], rows=60, draws=400) >= 0.93
