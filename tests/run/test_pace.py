"""How long the rest of a run takes, from events with times."""


import pytest

from finetune.events import Evaluation, Start, Step
from finetune.run.pace import Pace, TimeLeft


def events_of(step_s, *, total=100, eval_steps=None, eval_s=20.0):
    """A run's events until now: a step of each of these lengths, and after every `eval_steps` an evaluation."""
    now = 1000.0
    yield Start(total_steps=total, eval_steps=eval_steps, time_s=now)
    for number, seconds in enumerate(step_s, 1):
        now += seconds
        yield Step(step=number, total_steps=total, step_s=seconds, time_s=now)
        if eval_steps and number % eval_steps == 0:
            now += eval_s
            yield Evaluation(step=number, eval_s=eval_s, time_s=now)


def left_after(step_s, **run):
    return Pace.of(events_of(step_s, **run)).left


def test_after_ten_steps_the_time_left_is_a_range_that_is_wider_where_speed_changes():
    assert left_after([1.0] * 9, total=99) == TimeLeft(90.0) and left_after([]) is None
    steady, changing = left_after([1.0] * 10), left_after([1.0] * 6 + [2.0] * 4)
    assert 86 < steady.low_s < 90 < steady.high_s < 94
    assert changing.low_s < 90 < 180 < changing.high_s


def test_evaluations_to_come_are_added_and_widen_nothing():
    left = left_after([1.0] * 22, eval_steps=10)  # after 30, 40 to 90, and 100 after the last step
    assert left.likely_s == pytest.approx(78 + 7 * 20) and left.low_s > 0.95 * left.likely_s
    at_the_evaluation = left_after([1.0] * 21, eval_steps=10)
    assert at_the_evaluation.likely_s == pytest.approx(79 + 7 * 20)
    after_it = left_after([1.0] * 20, eval_steps=10)
    assert after_it.likely_s == pytest.approx(80 + 7 * 20)


def test_no_range_is_given_before_a_first_evaluation():
    assert left_after([1.0] * 15, eval_steps=20) == TimeLeft(85.0)


def test_the_time_left_is_that_of_the_newest_steps():
    assert left_after([100.0] * 4 + [1.0] * 10, total=104).high_s < 94


def test_a_step_takes_until_the_next_one_ends_but_not_the_time_that_a_run_was_paused():
    first, second = Step(step=1, step_s=2.0, time_s=100.0), Step(step=2, step_s=2.0, time_s=105.0)
    assert list(Pace.of([first, second]).steps_s) == [2.0, 5.0]
    assert list(Pace.of([first, Start(step=1, time_s=103.0), second]).steps_s) == [2.0, 2.0]


def test_a_pace_is_read_back_from_the_newest_events_and_its_numbers():
    events = list(events_of([1.0, 2.0, 3.0], eval_steps=2))
    newest = {event.kind: event for event in events}.values()
    pace = Pace.of(events)
    assert Pace.from_json(pace.as_json(), sorted(newest, key=lambda event: event.time_s)) == pace
