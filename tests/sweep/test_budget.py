"""`--budget` of a sweep: as many arms as earlier runs on this machine say."""

import pytest
from test_killed_sweep import RECIPE

from finetune.cli.sweep import _created, _seconds_of
from finetune.errors import CommandError
from finetune.events import ForecastCheck
from finetune.planner.history import record_run
from finetune.recipe import load_recipe
from finetune.run.prepare import prepare

OVERRIDES = [*RECIPE[1:], "max_steps=2", "learning_rate=1e-4,2e-4,4e-4,8e-4"]


def new_sweep(path, budget):
    return _created("tiny-cpu", [*OVERRIDES, f"output_dir={path}"], model=None, data=None, budget=budget, quiet=True)


def test_a_budget_is_read_with_its_unit():
    assert (_seconds_of("3h"), _seconds_of("90m"), _seconds_of("1.5d")) == (10800, 5400, 129600)
    for text in ("3", "h", "-1h", "nanh", "3 weeks"):
        with pytest.raises(CommandError, match="is not a duration"):
            _seconds_of(text)


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
