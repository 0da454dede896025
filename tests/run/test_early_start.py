"""While a run is planned, its worker imports libraries; it starts the run, or ends with the command."""

import psutil
import pytest
from conftest import events_of

from finetune.events import State
from finetune.run import control

pytestmark = pytest.mark.slow


def descendants(process):
    return psutil.Process(process.pid).children(recursive=True)


def wait_for_worker(supervisor):
    while not (workers := descendants(supervisor)):
        assert supervisor.poll() is None
    return workers[0]


def test_the_early_worker_trains(make_run):
    run = make_run()
    with control.early_supervisor() as supervisor:
        worker = wait_for_worker(supervisor)
        assert control.start(run, supervisor) == supervisor.pid
    assert supervisor.wait(300) == 0
    assert control.read_state(run).state == "finished"
    assert not worker.is_running() and "'loss'" in run.log.read_text()


def test_without_a_run_nothing_is_left():
    with control.early_supervisor() as supervisor:
        worker = wait_for_worker(supervisor)
    assert supervisor.wait(30) == 0
    psutil.wait_procs([worker], timeout=30)
    assert not worker.is_running()


def test_a_run_whose_early_worker_died_is_trained_by_another(make_run):
    run = make_run()
    with control.early_supervisor() as supervisor:
        wait_for_worker(supervisor).kill()
        control.start(run, supervisor)
    assert supervisor.wait(300) == 0
    assert [event.attempt for event in events_of(run, State) if event.state == "starting"] == [1]


def test_a_run_whose_early_supervisor_died_gets_another(make_run):
    run = make_run()
    with control.early_supervisor() as supervisor:
        worker = wait_for_worker(supervisor)
        supervisor.kill()
        supervisor.wait()
        assert control.start(run, supervisor) != supervisor.pid
    assert control.wait(run, 300) and control.read_state(run).state == "finished"
    psutil.wait_procs([worker], timeout=30)
    assert not worker.is_running()
