"""How long the rest of a run takes, from events with times."""

import pytest

from finetune.events import Evaluation, Start, Step
from finetune.run.pace import Pace


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
    return Pace.of(events_of(step_s, **run)).left_s


def test_the_time_left_is_the_median_of_the_newest_steps_and_the_evaluations_to_come():
    assert left_after([1.0] * 9, total=99) == 90.0 and left_after([]) is None
    assert left_after([100.0] * 4 + [1.0] * 10, total=104) == 90.0
    assert left_after([1.0] * 22, eval_steps=10) == pytest.approx(78 + 7 * 20)  # after 30, 40 to 90, and 100
    assert left_after([1.0] * 20, eval_steps=10) == pytest.approx(80 + 7 * 20)


def test_a_step_takes_until_the_next_one_ends_but_not_the_time_that_a_run_was_paused():
    first, second = Step(step=1, step_s=2.0, time_s=100.0), Step(step=2, step_s=2.0, time_s=105.0)
    assert list(Pace.of([first, second]).steps_s) == [2.0, 5.0]
    assert list(Pace.of([first, Start(step=1, time_s=103.0), second]).steps_s) == [2.0, 2.0]


def test_a_pace_is_read_back_from_the_newest_events_and_its_numbers():
    events = list(events_of([1.0, 2.0, 3.0], eval_steps=2))
    newest = {event.kind: event for event in events}.values()
    pace = Pace.of(events)
    assert Pace.from_json(pace.as_json(), sorted(newest, key=lambda event: event.time_s)) == pace
