"""A run that is an arm of a sweep: it stops where its sweep says, goes on bit-exactly, and keeps each row's held-out loss."""

import pytest
from conftest import adapter_hash

from finetune.events import Evaluation, read_events
from finetune.files import read_json
from finetune.run.held_out import let_train, losses_path
from finetune.run.state import read_state

HELD_OUT = ("eval_steps=4", "sample_answers=0")


@pytest.mark.slow
def test_an_arm_that_paused_learns_what_a_run_in_one_go_learns(make_run, train):
    whole, arm = make_run(*HELD_OUT), make_run(*HELD_OUT)
    assert train(whole) == 0
    let_train(arm, 3)
    assert train(arm) == 143
    assert (read_state(arm).state, read_state(arm).step) == ("stopped", 3)
    let_train(arm, None)
    assert train(arm) == 0
    assert adapter_hash(arm) == adapter_hash(whole)


@pytest.mark.slow
def test_an_arm_keeps_the_loss_of_each_held_out_row(make_run, train):
    arm = make_run(*HELD_OUT, "per_device_eval_batch_size=1")
    let_train(arm, 3)
    assert train(arm) == 143
    values = read_json(losses_path(arm, 3), dict)
    evaluation = next(event for event in read_events(arm.events) if isinstance(event, Evaluation))
    assert len(values["losses"]) == 8 and min(values["tokens"]) > 0
    assert values["mean"] == pytest.approx(evaluation.eval_loss)
    assert sum(values["losses"]) / 8 == pytest.approx(values["mean"], abs=1e-5)
