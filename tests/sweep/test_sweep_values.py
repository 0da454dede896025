"""Which values a sweep tries, and in which order."""

import pytest

from finetune.cli.sweep import split_overrides
from finetune.errors import CommandError, RecipeError
from finetune.recipe import load_recipe
from finetune.sweep import create_sweep, grid, rates_around


def parse(overrides):
    return load_recipe("tiny-cpu", overrides)


def test_an_override_with_commas_is_swept_unless_it_is_one_value():
    fixed, swept = split_overrides(["learning_rate=4e-4,1e-4,2e-4", "lora_r=16,64", "target_modules=q_proj,v_proj"], parse)
    assert fixed == ["target_modules=q_proj,v_proj"]
    assert swept == {"learning_rate": [1e-4, 2e-4, 4e-4], "lora_r": [16, 64]}
    assert len(grid(swept)) == 6


def test_a_wrong_value_too_many_and_arms_in_several_processes_are_refused():
    with pytest.raises(RecipeError, match="lora_r"):
        split_overrides(["lora_r=16,many"], parse)
    with pytest.raises(CommandError, match="65 combinations are more than 64"):
        split_overrides([f"lora_r={','.join(map(str, range(1, 66)))}"], parse)
    with pytest.raises(CommandError, match="in one process"):
        create_sweep(lambda values: parse(["launch.num_processes=2", "per_device_train_batch_size=4"]), {})


def test_the_rates_around_the_advice_are_half_a_decade_apart_and_the_middle_is_first():
    assert rates_around(2e-4) == [2e-5, 6.3e-5, 2e-4, 6.3e-4, 2e-3]
    rates = [arm.params["learning_rate"] for arm in grid({"learning_rate": rates_around(2e-4)})]
    assert rates[0] == 2e-4 and set(rates[:3]) == {6.3e-5, 2e-4, 6.3e-4}
