"""Two processes on the CPU train, fail, stop and resume like one."""

import json
import os
import shutil
import signal
import time

import psutil
import pytest
import torch
from launch_runs import adapter, events_of, last_state, steps

from finetune.events import Checkpoint, Start, State, Step

pytestmark = [pytest.mark.slow, pytest.mark.timeout(3000)]

#: Two processes add the same gradients in another order; float32 has 7 digits, and four optimizer steps pass them on.
LOSS_TOLERANCE = 1e-4


def test_two_processes_give_the_loss_curve_of_one_and_count_the_tokens_of_both(run_of_one, run_of_two):
    for expected, step in zip(steps(run_of_one), steps(run_of_two), strict=True):
        assert step.loss == pytest.approx(expected.loss, rel=LOSS_TOLERANCE)
        assert step.grad_norm == pytest.approx(expected.grad_norm, rel=1e-3)
        for name in ("learning_rate", "supervised_tokens", "real_tokens"):
            assert getattr(step, name) == getattr(expected, name)
    for name, weights in adapter(run_of_one).items():
        torch.testing.assert_close(adapter(run_of_two)[name], weights, rtol=1e-2, atol=1e-4)


def test_there_is_one_event_stream_and_each_process_has_its_random_state_in_the_seal(run_of_two):
    numbers = [[event.step for event in events_of(run_of_two, kind)] for kind in (Step, Checkpoint, Start)]
    assert numbers == [[1, 2, 3, 4], [2, 4], [0]]
    assert [event.state for event in events_of(run_of_two, State)] == ["starting", "running", "finished"]
    names = sorted(path.name for path in (run_of_two.checkpoints / "checkpoint-2").glob("rng_state*"))
    assert names == ["rng_state_0.pth", "rng_state_1.pth"]
    manifest = json.loads((run_of_two.checkpoints / "checkpoint-2" / "MANIFEST.json").read_text())
    assert manifest["facts"]["num_processes"] == 2


def copy_back_to_step_2(run, make_launch, *overrides):
    """A run directory of the same recipe in the state of `run` after step 2."""
    copy = make_launch(*overrides)
    shutil.copytree(run.checkpoints / "checkpoint-2", copy.checkpoints / "checkpoint-2")
    return copy


def test_resuming_with_the_same_processes_is_exact(run_of_two, make_launch, supervise):
    run = copy_back_to_step_2(run_of_two, make_launch, "launch.num_processes=2")
    assert supervise(run).wait() == 0, run.log.read_text()[-3000:]
    start = events_of(run, Start)[0]
    assert start.resumed_from == "checkpoint-2" and start.exact is True
    assert [event.step for event in steps(run)] == [3, 4]
    for name, weights in adapter(run_of_two).items():
        assert torch.equal(adapter(run)[name], weights), name


def test_resuming_with_another_number_of_processes_says_that_it_is_approximate(run_of_two, make_launch, supervise):
    run = copy_back_to_step_2(run_of_two, make_launch)
    assert supervise(run).wait() == 0, run.log.read_text()[-3000:]
    start = events_of(run, Start)[0]
    assert start.exact is False and "world size is 1, not 2" in start.approximate_because[0]
    for expected, original in zip(steps(run), steps(run_of_two)[2:], strict=True):
        assert expected.loss == pytest.approx(original.loss, rel=LOSS_TOLERANCE)


def test_a_killed_process_ends_all_in_time_is_named_and_the_run_resumes_and_stops_with_a_seal(
    run_of_two, make_launch, supervise
):
    run = make_launch("launch.num_processes=2", "max_steps=400")
    supervised = supervise(run)
    supervised.wait_for_step(3)
    ranks = supervised.ranks()
    assert sorted(ranks) == [0, 1]
    os.kill(ranks[1], signal.SIGKILL)
    killed_s = time.monotonic()
    code = supervised.wait()
    assert time.monotonic() - killed_s < 300  # gloo would wait for half an hour
    assert code == 1
    assert not any(psutil.pid_exists(pid) for pid in ranks.values())
    state = last_state(run)
    assert state.state == "failed" and "process 1 of 2 was killed" in state.message and "finetune resume" in state.message
    resumed = supervise(run)
    resumed.wait_for_step(steps(run)[-1].step + 1)
    start = events_of(run, Start)[-1]
    assert start.step >= 2 and start.exact is True
    resumed.process.send_signal(signal.SIGTERM)
    assert resumed.wait() == 143
    state, last = last_state(run), steps(run)[-1].step  # both stopped after the same step
    assert state.state == "paused" and f"paused at step {last}" in state.message
    assert (run.checkpoints / f"checkpoint-{last}" / "MANIFEST.json").is_file()
