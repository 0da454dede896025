"""What a run costs, before and after it."""

import pytest

from finetune.events import RunWarning, Start, State, Step
from finetune.planner.run_time import RunTime, expense_of, run_cost

HOUR = 3600.0


def test_the_range_of_the_time_is_that_of_the_cost():
    cost = run_cost(2.0, RunTime(HOUR, 1.5 * HOUR, 2 * HOUR, 3, True), 9.0)
    assert (cost.low, cost.likely, cost.high) == (2.0, 3.0, 4.0)
    assert cost.summary == "2.00 to 4.00 at 2 an hour"


def test_without_a_measured_run_the_speed_model_says_no_range():
    cost = run_cost(0.5, None, 2 * HOUR)
    assert (cost.low, cost.likely, cost.high) == (None, 1.0, None) and "not measured here" in cost.summary
    assert run_cost(None, None, HOUR) is None and run_cost(0.5, None, None) is None


def test_two_attempts_are_paid_and_the_time_between_them_is_not():
    events = [
        State(state="starting", time_s=100.0), Start(time_s=110.0), Step(step=1, step_s=36.0, power_w=300.0, time_s=160.0),
        State(state="starting", time_s=5000.0), Step(step=1, step_s=36.0, power_w=200.0, time_s=5060.0),
    ]  # fmt: skip
    expense = expense_of(events, 30.0)
    assert expense.seconds == 120.0 and expense.cost == pytest.approx(1.0) and expense.energy_wh == pytest.approx(5.0)
    assert expense.summary == "cost 1.00; energy of the steps 5.0 Wh"


@pytest.mark.parametrize("end", [State(state="failed", time_s=160.0), Step(step=2, time_s=160.0)], ids=["ended", "killed"])
def test_what_comes_between_two_attempts_is_not_paid(end):
    events = [
        State(state="queued", time_s=10.0), State(state="starting", time_s=100.0), end, RunWarning(message="", time_s=900.0),
        State(state="queued", time_s=1000.0), RunWarning(message="", time_s=4000.0), State(state="starting", time_s=5000.0),
        Start(time_s=5010.0), Step(step=2, time_s=5060.0), State(state="finished", time_s=5070.0),
        RunWarning(message="the notice could not be sent", time_s=9000.0),
    ]  # fmt: skip
    assert expense_of(events, None).seconds == 60.0 + 70.0


def test_what_is_not_measured_is_not_said():
    expense = expense_of([State(state="starting", time_s=1.0), Step(step=1, step_s=1.0, time_s=3.0)], None)
    assert (expense.seconds, expense.energy_wh, expense.cost, expense.summary) == (2.0, None, None, "")
