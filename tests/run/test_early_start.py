"""While a run is planned, its worker imports libraries; it starts the run, or ends with the command."""

import json
import subprocess
import sys
from types import SimpleNamespace

import psutil
import pytest
from conftest import events_of

from finetune.events import State
from finetune.files import read_json
from finetune.run import control
from finetune.run.supervise import Supervisor

pytestmark = pytest.mark.slow


def wait_for_worker(supervisor):
    while not (workers := psutil.Process(supervisor.pid).children()):
        assert supervisor.poll() is None
    return workers[0]


def test_the_early_worker_trains(make_run):
    run = make_run()
    with control.early_supervisor() as supervisor:
        worker = wait_for_worker(supervisor)
        assert control.start(run, supervisor) == supervisor.pid
        while "worker" not in (processes := read_json(run.process)):
            assert supervisor.poll() is None
        assert processes["worker"]["pid"] == worker.pid
    assert supervisor.wait(300) == 0
    assert control.read_state(run).state == "finished" and "'loss'" in run.log.read_text()


def test_a_worker_that_waited_sees_the_gpu_that_was_planned(tmp_path):
    code = "from finetune.run.worker import *; wait_for_run(); print(sys.argv[1:], os.environ['CUDA_VISIBLE_DEVICES'])"
    line = json.dumps({"run": str(tmp_path), "environment": {"CUDA_VISIBLE_DEVICES": "GPU-1"}})
    subprocess.run([sys.executable, "-c", code], input=line, text=True, check=True)
    assert (tmp_path / "log.txt").read_text().endswith(f"['{tmp_path}'] GPU-1\n")


def test_a_run_that_must_wait_for_others_holds_no_libraries(make_run):
    early = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    supervisor = Supervisor(make_run(), early)
    waits = iter([["another run"], []])
    assert supervisor._wait_for_turn(SimpleNamespace(ahead=lambda: next(waits)))
    assert supervisor.early_worker is None and early.poll() is not None


def test_without_a_run_nothing_is_left():
    with control.early_supervisor() as supervisor:
        worker = wait_for_worker(supervisor)
    assert supervisor.wait(30) == 0
    assert psutil.wait_procs([worker], timeout=30)[1] == []


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
    assert psutil.wait_procs([worker], timeout=30)[1] == []
