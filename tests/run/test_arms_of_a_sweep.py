"""A run that is an arm of a sweep keeps the held-out loss of each row."""

import pytest
from conftest import events_of

from finetune.events import Evaluation
from finetune.run.held_out import row_losses_of


@pytest.mark.slow
def test_an_arm_keeps_the_loss_of_each_held_out_row(make_run, train):
    arm = make_run("eval_steps=4", "sample_answers=0", "per_device_eval_batch_size=1")
    arm.arm.touch()
    assert train(arm) == 0
    row_losses = row_losses_of(arm)
    evaluations = events_of(arm, Evaluation)
    assert [losses.step for losses in row_losses] == [event.step for event in evaluations] == [4, 8]
    assert len(row_losses[0].losses) == 8 and min(row_losses[0].tokens) > 0
    assert row_losses[0].mean == pytest.approx(evaluations[0].eval_loss)
    assert sum(row_losses[0].losses) / 8 == pytest.approx(row_losses[0].mean, abs=1e-5)
