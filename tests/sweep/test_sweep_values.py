"""Which values a sweep tries, in which order, and how many within `--budget`."""

import pytest
from test_killed_sweep import RECIPE

from finetune.cli.sweep import _create, _parse_duration_s, split_overrides
from finetune.errors import CommandError, RecipeError
from finetune.events import ForecastCheck
from finetune.planner.history import record_run
from finetune.recipe import load_recipe
from finetune.run.prepare import prepare
from finetune.sweep.sweep import create_sweep, grid, rates_around

OVERRIDES = [*RECIPE[1:], "max_steps=2", "learning_rate=1e-4,2e-4,4e-4,8e-4"]


def parse(overrides):
    return load_recipe("tiny-cpu", overrides)


def test_an_override_with_commas_is_swept_unless_it_is_one_value():
    fixed, swept = split_overrides(["learning_rate=4e-4,1e-4,2e-4", "lora_r=16,64", "target_modules=q_proj,v_proj"], parse)
    assert fixed == ["target_modules=q_proj,v_proj"]
    assert swept == {"learning_rate": [1e-4, 2e-4, 4e-4], "lora_r": [16, 64]}
    assert len(grid(swept)) == 6


def test_a_wrong_value_and_too_many_are_refused():
    with pytest.raises(RecipeError, match="lora_r"):
        split_overrides(["lora_r=16,many"], parse)
    with pytest.raises(CommandError, match="65 combinations are more than 64"):
        split_overrides([f"lora_r={','.join(map(str, range(1, 66)))}"], parse)


def test_arms_in_several_processes_are_refused_before_anything_is_planned():
    with pytest.raises(CommandError, match="in one process"):
        create_sweep(lambda values: parse(["launch.num_processes=2", "per_device_train_batch_size=4"]), {})


def test_the_rates_around_the_advice_are_half_a_decade_apart():
    assert rates_around(2e-4) == [2e-5, 6.3e-5, 2e-4, 6.3e-4, 2e-3]


def test_the_middle_of_the_grid_is_first():
    rates = [arm.params["learning_rate"] for arm in grid({"learning_rate": rates_around(2e-4)})]
    assert rates[0] == 2e-4 and set(rates[:3]) == {6.3e-5, 2e-4, 6.3e-4}


def new_sweep(path, budget):
    return _create("tiny-cpu", [*OVERRIDES, f"output_dir={path}"], model=None, data=None, budget=budget, quiet=True)


def test_a_budget_is_read_with_its_unit():
    assert (_parse_duration_s("3h"), _parse_duration_s("90m"), _parse_duration_s("1.5d")) == (10800, 5400, 129600)
    for text in ("3", "h", "-1h", "nanh", "3 weeks"):
        with pytest.raises(CommandError, match="is not a duration"):
            _parse_duration_s(text)


@pytest.mark.slow
def test_the_arms_that_three_hours_allow_are_named_before_the_start(tmp_path):
    with pytest.raises(CommandError, match="no such run has been measured on this machine"):
        new_sweep(tmp_path / "unmeasured", "3h")
    plan = prepare(load_recipe("tiny-cpu", OVERRIDES[:-1])).plan
    record_run(plan, ForecastCheck(), step_s=None, train_s=4000.0, load_s=100.0)
    sweep = new_sweep(tmp_path / "budgeted", "3h")
    facts = sweep.as_json()
    # an arm takes 4,100 s: two are within 10,800 s, three are not
    assert sorted(arm["values"]["learning_rate"] for arm in facts["arms"]) == [2e-4, 4e-4]
    assert facts["forecast_s"] == pytest.approx(8200) and facts["budget_s"] == 10800
    assert [entry["reason"] for entry in facts["left_out"]] == ["only 2 arms fit the budget"] * 2
