"""How long the rest of a run takes, from its events."""

import pytest

from finetune.events import Evaluation, Start, Step
from finetune.run.state import Pace


def left_after(step_s, *, total=100, eval_steps=None, eval_s=20.0):
    """The time left after steps of these lengths, with an evaluation after every `eval_steps` but the newest."""
    pace = Pace()
    pace.add(Start(total_steps=total, eval_steps=eval_steps))
    for number, seconds in enumerate(step_s, 1):
        if eval_steps and number > 1 and (number - 1) % eval_steps == 0:
            pace.add(Evaluation(step=number - 1, eval_s=eval_s))
        pace.add(Step(step=number, total_steps=total, step_s=seconds))
    return pace.left_s


def test_the_time_left_is_the_median_of_the_newest_steps_and_the_evaluations_to_come():
    assert left_after([1.0] * 9, total=99) == 90.0 and left_after([]) is None
    assert left_after([100.0] * 4 + [1.0] * 10, total=104) == 90.0
    assert left_after([1.0] * 22, eval_steps=10) == pytest.approx(78 + 7 * 20)  # after 30, 40 to 90
    assert left_after([1.0] * 20, eval_steps=10) == pytest.approx(80 + 8 * 20)  # the evaluation of step 20 has not ended


def test_another_attempt_is_unknown_until_its_first_step():
    pace = Pace()
    for event in (Step(step=1, total_steps=9, step_s=2.0), Start(step=1, total_steps=9)):
        pace.add(event)
    assert pace.left_s is None
