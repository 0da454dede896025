"""How long the rest of a run takes and where the time of a step goes, from events with times."""

from types import SimpleNamespace

import pytest

from finetune.events import Evaluation, Start, Step
from finetune.run.pace import Pace


def events_of(step_s, *, total=100, eval_steps=None, eval_s=20.0):
    """A run's events until now: a step of each of these lengths, and after every `eval_steps` an evaluation."""
    now = 1000.0
    yield Start(total_steps=total, eval_steps=eval_steps, time_s=now)
    for number, seconds in enumerate(step_s, 1):
        now += seconds
        yield Step(step=number, total_steps=total, step_s=seconds, host_wait_s=0.01, time_s=now)
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


def sentence_of(step_s, wait_s, utilisation=None, *, steps=9, gpu_s=None, **settings):
    """Where the time of these steps goes; the first two take a minute."""
    measured = {"host_wait_s": wait_s, "gpu_utilisation": utilisation}
    events = (Step(step=number, step_s=step_s if number > 2 else 60.0, **measured) for number in range(1, steps + 1))
    settings = {"gradient_accumulation_steps": 1, "lean_layers": True, "torch_compile": False} | settings
    plan = SimpleNamespace(settings=SimpleNamespace(**settings), reasons={"torch_compile": "not tried"}, modelled_gpu_s=gpu_s)
    clauses, values = Pace.of([Start(), *events]).step_time_clauses(plan)
    return " ".join(clauses).format(**values)


def test_without_a_wait_for_the_gpu_python_is_the_limit():
    saves = "compiled layers would save about {} ms (not compiled: not tried)."
    waited = "The GPU waited about 152 ms of each 337 ms step for Python; "
    assert sentence_of(0.337, 0.01, 0.55) == waited + saves.format(112)  # a third of the host's time
    assert sentence_of(0.337, 0.01, 0.8).endswith(saves.format(67))  # not more than the GPU waits
    assert sentence_of(0.337, 0.01, 0.55, torch_compile=True).startswith(waited + "longer examples")
    assert sentence_of(0.337, 0.01, gpu_s=0.178).startswith("By the speed model, the GPU waited about 159 ms of each 337 ms")


def test_with_a_wait_for_the_gpu_in_a_micro_batch_the_gpu_is_busy():
    busy = "The GPU is busy: at the end of a {} ms step, Python waited 60 ms for the GPU."
    assert sentence_of(0.178, 0.06, 0.97) == busy.format(178)
    assert sentence_of(1.424, 0.06, 0.97, gradient_accumulation_steps=8) == busy.format("1,424")


def test_nothing_is_said_of_few_steps_a_cpu_a_gpu_without_pauses_and_an_unknown_one():
    few, cpu = sentence_of(0.3, 0.01, 0.5, steps=4), sentence_of(0.3, None)
    assert (few, cpu, sentence_of(0.3, 0.01, 0.95), sentence_of(0.3, 0.01)) == ("", "", "", "")
