"""The interval of base against tuned covers the truth, and says when a difference is not significant."""

import numpy as np
import pytest

from finetune.evaluate.results import difference
from finetune.evaluate.scorers import score_range

OTHER_SHARES = ((0.3, 0.6, 0.2), (0.97, 0.2, 0.01))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("rows", "base", "better", "worse"),
    [(100, 0.4, 0.3, 0.1), *(pytest.param(120, *shares, marks=pytest.mark.exhaustive) for shares in OTHER_SHARES)],
)
def test_the_interval_covers_the_true_difference_in_93_of_100_evaluations(rows, base, better, worse):
    """`better`: share of the base's wrong rows that the tuned model has right; `worse`: of its right rows, wrong."""
    rng, covered = np.random.default_rng(1), 0
    truth = (1 - base) * better - base * worse
    for _ in range(200):
        right = rng.random(rows) < base
        tuned = np.where(right, rng.random(rows) >= worse, rng.random(rows) < better)
        estimate = difference(right, tuned, span=1.0)
        covered += estimate.low <= truth <= estimate.high
    assert covered >= 0.93 * 200


@pytest.mark.slow
def test_the_interval_of_a_loss_weighted_by_tokens_covers_the_truth():
    """Rows' losses and lengths are independent, so that the true weighted mean is that of the losses."""
    rng, covered = np.random.default_rng(2), 0
    for _ in range(100):
        base, tokens = rng.gamma(2.0, 1.0, 150), rng.integers(5, 60, 150)
        estimate = difference(base, base - 0.3 + rng.normal(0, 1.0, 150), tokens)
        covered += estimate.low <= -0.3 <= estimate.high
    assert covered >= 93


def test_a_difference_is_significant_when_zero_is_outside_and_scores_of_a_users_own_scale_have_intervals():
    base = [0, 1] * 30
    estimate = difference(base, [1] * 60, span=1.0)
    assert estimate.value == 0.5 and estimate.is_significant and estimate.more_rows is None
    few_rows = difference([0, 1, 0, 1], [1, 1, 0, 1], span=1.0)
    assert not few_rows.is_significant and few_rows.more_rows >= 4
    no_difference = difference([1, 0, 1] * 5, [1, 0, 1] * 5, span=1.0)
    assert (no_difference.value, no_difference.more_rows, no_difference.is_significant) == (0.0, None, False)
    assert no_difference.low < 0 < no_difference.high
    assert difference([1.0, 1.0], [2.0, 4.0], [3, 1]).value == pytest.approx(1.5)  # weighted
    rounding = difference([0, 0, 0.3], [0.1, 0.2, 0], span=1.0)
    assert rounding.more_rows is None and rounding.low < 0 < rounding.high
    scores = [1, 1, 2, 1, 1, 1], [5, 4, 5, 5, 4, 5]
    assert score_range("exact-last", [0, 1], [1, 1]) == 1.0 and score_range("stars", *scores) == 4
    stars = difference(*scores, span=score_range("stars", *scores))
    assert stars.low < stars.value < stars.high


@pytest.mark.parametrize(("worse", "is_significant"), [(1, False), (4, False), (5, False), (6, True)])
def test_few_rows_that_got_worse_are_significant_as_in_the_exact_test_of_mcnemar(worse, is_significant):
    estimate = difference([1] * 120, [0] * worse + [1] * (120 - worse), span=1.0)
    assert estimate.is_significant == is_significant and (is_significant or estimate.more_rows > 8 * (6 - worse))
