"""benchmarks/step_time.py: a line through noisy ratios finds growth, and its interval says how surely."""

import math
import random
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from benchmarks.step_time import trend  # noqa: E402


@pytest.mark.parametrize("growth", [0.0, 0.1])
def test_growth_is_within_the_interval_and_the_interval_is_that_of_the_noise(growth):
    noise = random.Random(0)
    estimate, wide = trend([math.exp(growth * step / 1249 + noise.gauss(0, 0.25)) for step in range(1250)])
    assert abs(estimate - growth) < wide
    assert wide == pytest.approx(1.96 * 0.25 * math.sqrt(12 / 1250), rel=0.1)
