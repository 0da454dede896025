"""The interval of base against tuned covers the truth, and says when the rows don't tell."""

import numpy as np
import pytest

from finetune.evaluate.paired import difference


@pytest.mark.parametrize(("rows", "base", "better", "worse"), [(100, 0.4, 0.3, 0.1), (120, 0.3, 0.6, 0.2)])
def test_the_interval_covers_the_true_difference_in_93_of_100_evaluations(rows, base, better, worse):
    """`better`: share of the base's wrong rows that the tuned model has right; `worse`: of its right rows, wrong."""
    chance, covered = np.random.default_rng(1), 0
    truth = (1 - base) * better - base * worse
    for _ in range(400):
        right = chance.random(rows) < base
        tuned = np.where(right, chance.random(rows) >= worse, chance.random(rows) < better)
        made = difference(right, tuned, span=1.0)
        covered += made.low <= truth <= made.high
    assert covered >= 0.93 * 400


def test_the_interval_of_a_loss_weighted_by_tokens_covers_the_truth():
    """Rows' losses and lengths are independent, so that the true weighted mean is that of the losses."""
    chance, covered = np.random.default_rng(2), 0
    for _ in range(100):
        base, tokens = chance.gamma(2.0, 1.0, 150), chance.integers(5, 60, 150)
        made = difference(base, base - 0.3 + chance.normal(0, 1.0, 150), tokens)
        covered += made.low <= -0.3 <= made.high
    assert covered >= 93


def test_it_is_told_when_zero_is_outside_and_paired_rows_tell_sooner():
    base = [0, 1] * 30
    made = difference(base, [1] * 60, span=1.0)
    assert made.value == 0.5 and made.is_told and made.more_rows is None
    few = difference([0, 1, 0, 1], [1, 1, 0, 1], span=1.0)
    assert not few.is_told and few.more_rows >= 4


def test_no_difference_is_not_told_by_any_number_of_rows():
    same = difference([1, 0, 1] * 5, [1, 0, 1] * 5, span=1.0)
    assert (same.value, same.more_rows, same.is_told) == (0.0, None, False)
    assert same.low < 0 < same.high


def test_the_mean_is_weighted():
    assert difference([1.0, 1.0], [2.0, 4.0], [3, 1]).value == pytest.approx(1.5)
