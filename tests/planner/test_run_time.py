"""The time of a run by earlier ones on this machine."""

from finetune.events import Start, State, Step
from finetune.planner.history import MeasuredRun, RunTime, cost_of, run_time, seconds_spent


def measured(*train_s, model="m", load_s=1.0):
    return [MeasuredRun(model, 10.0, seconds, load_s) for seconds in train_s]


def test_nothing_is_said_without_a_measured_run_or_a_number_of_steps():
    assert run_time(10.0, "m", []) is None and run_time(None, "m", measured(1.0)) is None


def test_training_scales_with_the_workload_and_loading_does_not():
    assert run_time(20.0, "m", measured(3.0, load_s=5.0)) == RunTime(5.0, 6.0, 1)


def test_runs_of_the_same_model_count_if_there_are_any():
    assert run_time(10.0, "m", [*measured(1.0, 1.0, 4.0), *measured(9.0, model="other")]) == RunTime(1.0, 1.0, 3)
    assert run_time(10.0, "third", measured(1.0)).runs == 1


def test_a_run_costs_its_attempts_and_not_the_time_between():
    events = [State(state="starting"), Step(step=1), State(state="paused"), State(state="starting"), Start(), Step(step=2)]
    times = (0.0, 10.0, 20.0, 1000.0, 1005.0, 1030.0)
    for event, time_s in zip(events, times, strict=True):
        object.__setattr__(event, "time_s", time_s)
    assert seconds_spent(events) == 50 and cost_of(7200, 0.5) == 1 and cost_of(7200, None) is None
