"""Through the real supervisor and real processes: out of memory, a killed worker, a hanging one, two starters."""

import json
import os
import signal
import subprocess
import sys
import time

import pytest
from child_faults import put_in
from conftest import adapter_hash, events_of
from killed import Forked

from finetune.events import ForecastCheck, OutOfMemory, Retry, RunWarning, State, Step
from finetune.files import cache_dir
from finetune.planner.plan import read_plan
from finetune.run import control
from finetune.run import supervise as supervise_module
from finetune.run import worker as worker_module
from finetune.run.retry import adjust, adjusted_plan, adjusted_since_s
from finetune.run.state import is_alive, read_state
from finetune.system import take_lock

pytestmark = pytest.mark.slow
#: Out of memory, a run continues with one row at a time instead of two.
TWO_ROWS = ("effective_batch_size=4", "per_device_train_batch_size=2", "dataset.max_rows=32")


def supervise(run, fault, **environment):
    """Start the supervisor of a run, as a fork, whose forked worker has one fault in it, see child_faults.py."""

    def worker():
        put_in(*fault.split(":"), run.path)
        sys.argv = ["worker", str(run.path)]
        return worker_module.main()

    def supervisor():
        supervise_module.subprocess.Popen = lambda _, *, stdout, env, **__: Forked(worker, stdout, env)
        sys.argv = ["supervise", str(run.path)]
        return supervise_module.main()

    with run.log.open("ab") as log:
        return Forked(supervisor, log, {**os.environ, **environment}, new_session=True)


def steps(run):
    return {event.step: event for event in events_of(run, Step)}


def wait_for_step(process, run, step):
    while step not in steps(run):
        assert process.poll() is None, run.log.read_text()[-2000:]
        time.sleep(0.05)


@pytest.fixture(scope="module")
def unbroken(make_run, train):
    return train.whole(make_run(*TWO_ROWS, "eval_steps=4"))


@pytest.mark.parametrize("fault", ["step5:driver_oom", "evaluate:oom", "save:oom"])
def test_out_of_memory_anywhere_and_the_run_finishes_by_itself(unbroken, make_run, fault):
    run = make_run(*TWO_ROWS, "eval_steps=4")
    assert supervise(run, fault).wait() == 0, run.log.read_text()[-2000:]
    [retry] = events_of(run, Retry)
    assert retry.changes
    memory = events_of(run, OutOfMemory)[0]
    assert memory.phase and memory.micro_batch == 2
    for step, event in steps(unbroken).items():
        retried = steps(run)[step]
        assert retried.loss == pytest.approx(event.loss, abs=1e-5)
        assert (retried.supervised_tokens, retried.real_tokens) == (event.supervised_tokens, event.real_tokens)


def test_after_a_retry_memory_is_compared_with_a_forecast_of_what_runs_and_so_is_the_next_plans_history(make_run):
    run = make_run(*TWO_ROWS)
    assert supervise(run, "step5:oom").wait() == 0, run.log.read_text()[-2000:]
    planned, adjusted = read_plan(run.plan), adjusted_plan(run)
    assert adjusted.forecast.allocated_bytes < planned.forecast.allocated_bytes
    first, end = events_of(run, ForecastCheck)
    assert first.predicted_allocated_bytes == planned.forecast.allocated_bytes
    assert end.predicted_allocated_bytes == adjusted.forecast.allocated_bytes
    (row,) = (cache_dir() / "history.jsonl").read_text().splitlines()
    assert json.loads(row)["forecast_allocated_bytes"] == adjusted.forecast.allocated_bytes
    since_s = adjusted_since_s(run)
    assert [event.step for event in steps(run).values() if event.time_s >= since_s] == [5, 6, 7, 8]  # what is compared
    adjust(run, {"learning_rate": 1e-5})
    assert adjusted_plan(run).forecast == adjusted.forecast
    adjust(run, {"per_device_eval_batch_size": 1})  # a forecast of other settings is not taken for theirs
    assert adjusted_plan(run).forecast == planned.forecast


def test_out_of_memory_while_loading_is_not_tried_again_and_the_message_says_what_would_help(make_run):
    run = make_run(*TWO_ROWS)
    assert supervise(run, "load:oom").wait() == 5
    assert not events_of(run, Retry) and not run.adjustments.exists()
    message = read_state(run).message
    assert "while loading the model" in message and "plan again with a smaller model" in message  # 4-bit it is


def test_a_killed_worker_is_failed_at_once_and_resumes(unbroken, make_run, warm_starts):
    run = make_run(*TWO_ROWS, "eval_steps=4")
    assert supervise(run, "step5:kill").wait() == 1
    state = read_state(run)
    assert state.state == "failed" and "finetune resume" in state.message
    control.resume(run)
    assert control.wait(run, 900)
    assert adapter_hash(run) == adapter_hash(unbroken)


def test_a_hanging_worker_is_ended_after_the_deadline(make_run):
    run = make_run()
    assert supervise(run, "step5:hang", FINETUNE_HANG_DEADLINE_S="5").wait() == 1
    assert any("no progress for" in event.message for event in events_of(run, RunWarning))
    assert not is_alive(run)


def test_a_second_request_by_signal_or_file_ends_a_run_that_does_not_stop(make_run):
    run = make_run()
    process = supervise(run, "step5:hang", FINETUNE_STOP_DEADLINE_S="100000")
    wait_for_step(process, run, 4)
    process.send_signal(signal.SIGTERM)
    while not any(event.state == "pausing" for event in events_of(run, State)):
        time.sleep(0.05)
    run.stop_requests.write_text("15\n15\n")
    assert process.wait() == 143
    assert read_state(run).state == "paused" and not is_alive(run)


def test_a_supervisor_killed_leaves_no_hidden_orphan(make_run):
    run = make_run("max_steps=300")
    process = supervise(run, "load:none")
    wait_for_step(process, run, 2)
    process.kill()
    process.wait()
    assert read_state(run).state == "running"  # the worker continues, and every command sees it
    assert control.stop(run) and control.wait(run, 900)
    assert read_state(run).state == "paused"


def test_no_second_training_process_starts_beside_one_that_outlived_its_supervisor(make_run, warm_python):
    run = make_run()
    lock = take_lock(run.worker_lock)
    code = "import sys, finetune.run.worker as worker; worker._PREDECESSOR_S = 0; sys.exit(worker.main())"
    assert is_alive(run) and subprocess.run([warm_python, "-c", code, str(run.path)]).returncode == 1
    assert not run.events.exists()
    lock.release()


def test_two_starters_do_not_run_it_twice_and_no_process_is_left(make_run):
    run = make_run()
    first, second = supervise(run, "load:none"), supervise(run, "load:none")
    codes = sorted([first.wait(), second.wait()])
    assert codes == [0, 2]
    assert [event.step for event in events_of(run, Step)] == list(range(1, 9))
    assert not is_alive(run)
