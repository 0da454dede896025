"""`pause` frees the card within a step; `resume` continues as if it was never paused; `finish` ends a run."""

import time

import pytest
from conftest import adapter_hash, events_of

from finetune.events import Evaluation, Result, Step
from finetune.run import control
from finetune.run.state import is_alive, living_processes, read_state

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("warm_starts")]


def steps_of(run):
    return [event.step for event in events_of(run, Step)]


def started(run):
    control.start(run)
    while len(steps_of(run)) < 3:
        assert is_alive(run), run.log.read_text()[-2000:]
        time.sleep(0.01)
    return run


@pytest.fixture
def steps_when_asked(monkeypatch):
    """Steps that a run had ended when it was asked to stop."""
    stop, seen = control.stop, []

    def asked(run):
        seen.append(len(steps_of(run)))
        return stop(run)

    monkeypatch.setattr(control, "stop", asked)
    return seen


def test_a_paused_run_leaves_the_card_within_a_step_and_continues_bit_exactly(make_run, train, finetune, steps_when_asked):
    settings = ("lora_dropout=0.1", "max_steps=8", "effective_batch_size=16")  # steps that are long beside a signal's way
    whole, paused = train.whole(make_run(*settings)), started(make_run(*settings))
    code, output = finetune("pause", str(paused.path))
    at = steps_of(paused)[-1]
    assert code == 0 and f"paused at step {at} of 8." in output and "finetune resume" in output
    assert at <= steps_when_asked[0] + 2, "the step that ran while it was asked, and at most one more"
    assert not living_processes(paused)
    control.resume(paused)
    assert control.wait(paused, 900)
    assert steps_of(paused) == list(range(1, 9))
    assert adapter_hash(paused) == adapter_hash(whole)
    code, output = finetune("pause", str(paused.path))
    assert code == 0 and "Finished" in output
    assert finetune("pause", "nothing")[0] == 2


def test_a_run_that_is_asked_to_finish_ends_after_its_step_with_its_best_step_as_the_result(make_run, finetune):
    run = started(make_run("max_steps=5000", "eval_steps=2", "effective_batch_size=16"))
    asked_at = steps_of(run)[-1]
    code, _ = finetune("finish", str(run.path))
    state, last = read_state(run), steps_of(run)[-1]
    assert code == 0 and state.state == "finished" and f"ended at step {last} of 5000, on request; adapter in" in state.message
    assert last <= asked_at + 2
    losses = {event.step: event.eval_loss for event in events_of(run, Evaluation)}
    (result,) = events_of(run, Result)
    assert last in losses and result.eval_loss == min(losses.values()) and result.last_step == last
    assert (run.adapter / "adapter_model.safetensors").is_file()
    code, output = finetune("finish", str(run.path))
    assert code == 2 and "is not running: finished" in output
