"""Which arms a sweep drops, and which values it tries."""

import numpy as np
import pytest

from benchmarks.sweep_halving import keeps_best
from finetune.errors import CommandError, RecipeError
from finetune.recipe import load_recipe
from finetune.sweep.grid import are_neighbours, combinations, nearest_to_centre, rates_around, split_overrides
from finetune.sweep.halving import RowLosses, dropped, rungs_of


def parse(overrides):
    return load_recipe("tiny-cpu", overrides)


def arm(*losses):
    return RowLosses(10, float(np.mean(losses)), losses, (5,) * len(losses))


def beside(first, second):
    return abs(first - second) == 1


SPREAD = np.linspace(0, 0.2, 40)


def test_an_arm_that_is_surely_behind_is_dropped_and_the_best_ones_neighbour_stays():
    results = [arm(*(level + SPREAD)) for level in (3.0, 2.0, 1.0, 2.0, 3.0)]
    assert dropped(results, beside) == [0, 4]


def test_an_arm_that_can_not_be_told_apart_stays():
    noise = np.random.default_rng(0).normal(0, 1, 40)
    results = [arm(*(1.0 + SPREAD)), arm(*(1.0 + SPREAD)), arm(*(1.02 + SPREAD)), arm(*(1.05 + SPREAD + noise))]
    assert 3 not in dropped(results, beside)


def test_arms_that_diverged_are_dropped_and_the_best_one_never_is():
    assert dropped([None, arm(1.0, 1.1), None], beside) == [0, 2]
    assert dropped([None, None], beside) == [0, 1]


def test_arms_without_row_losses_are_compared_by_their_means():
    results = [RowLosses(10, mean) for mean in (1.0, 2.0, 3.0, 4.0)]
    assert dropped(results, beside) == [2, 3]


@pytest.mark.slow
def test_the_best_arm_is_a_finalist_in_95_of_100_simulated_sweeps():
    rng = np.random.default_rng(7)
    assert sum(keeps_best(rng)[0] for _ in range(100)) >= 95


def test_rungs_end_with_the_last_step():
    assert rungs_of(250) == [62, 125, 250] and rungs_of(1) == [1]


def test_an_override_with_commas_is_swept_unless_it_is_one_value():
    fixed, swept = split_overrides(["learning_rate=4e-4,1e-4,2e-4", "lora_r=16,64", "target_modules=q_proj,v_proj"], parse)
    assert fixed == ["target_modules=q_proj,v_proj"]
    assert swept == {"learning_rate": [1e-4, 2e-4, 4e-4], "lora_r": [16, 64]}
    assert len(combinations(swept)) == 6


def test_a_wrong_value_and_too_many_are_refused():
    with pytest.raises(RecipeError, match="lora_r"):
        split_overrides(["lora_r=16,many"], parse)
    with pytest.raises(CommandError, match="65 combinations are more than 64"):
        split_overrides([f"lora_r={','.join(map(str, range(1, 66)))}"], parse)


def test_the_rates_around_the_advice_are_half_a_decade_apart():
    assert rates_around(2e-4) == [2e-5, 6.3e-5, 2e-4, 6.3e-4, 2e-3]


def test_a_budget_keeps_the_middle_of_the_grid():
    swept = {"learning_rate": rates_around(2e-4)}
    chosen = nearest_to_centre(combinations(swept), swept, 3)
    assert [values["learning_rate"] for values in chosen] == [6.3e-5, 2e-4, 6.3e-4]


def test_neighbours_differ_by_one_step_of_one_setting():
    swept = {"learning_rate": [1, 2, 3], "lora_r": [16, 64]}
    first = {"learning_rate": 1, "lora_r": 16}
    assert are_neighbours(first, {"learning_rate": 2, "lora_r": 16}, swept)
    assert not are_neighbours(first, {"learning_rate": 2, "lora_r": 64}, swept)
    assert not are_neighbours(first, {"learning_rate": 3, "lora_r": 16}, swept)
