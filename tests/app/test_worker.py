"""Calls of a worker: they queue up, one can be cancelled, errors come back, and a killed process is started again."""

import os
import signal
import sys
import threading
from concurrent.futures import ThreadPoolExecutor

import psutil
import pytest

import app.worker
from app.worker import SupersededError, Worker, WorkerError

TARGET = """
import os, signal, time
from app.worker import serve
from finetune.errors import RecipeError
class Target:
    def add(self, work, first, second):
        print("a library prints")
        return first + second
    def work(self, work):
        while True:
            work.report("at work")
            time.sleep(0.01)
    def until_cancelled(self, work):
        work.report("begun")
        while not work.is_cancelled():
            time.sleep(0.01)
        return "so far"
    def refuse(self, work):
        raise RecipeError("no such thing", "Take another.")
    def kill_itself(self, work, once):
        if not os.path.exists(once):
            open(once, "w").close()
            os.kill(os.getpid(), signal.SIGKILL)
        return "there"
    def hang(self, work):
        time.sleep(1000)
serve(Target())
"""


@pytest.fixture
def worker(tmp_path, monkeypatch):
    monkeypatch.setattr(app.worker, "module_command", lambda *_: [sys.executable, "-c", TARGET])
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(sys.path))
    worker = Worker(tmp_path, ".target", log=tmp_path / "log.txt")
    yield worker
    process = worker._process
    worker.close()
    assert not psutil.pid_exists(process.pid)


def in_a_thread(pool, worker, method, **options):
    """The future of a call that the process is at work on."""
    reported = threading.Event()
    future = pool.submit(worker.call, method, report=lambda _: reported.set(), **options)
    assert reported.wait(60)
    return future


def test_an_error_comes_back_with_its_fix_the_next_call_is_answered_and_a_cancelled_one_may_return_what_it_has(worker):
    with pytest.raises(WorkerError) as raised:
        worker.call("refuse")
    assert (raised.value.problems, raised.value.fix, raised.value.exit_code) == (["no such thing"], "Take another.", 2)
    with pytest.raises(WorkerError, match="no attribute 'unheard_of'"):
        worker.call("unheard_of")
    assert worker.call("add", first="a", second="b") == "ab"
    with ThreadPoolExecutor() as pool:
        call = in_a_thread(pool, worker, "until_cancelled")
        worker.cancel("until_cancelled")
        assert call.result(60) == "so far"


def test_calls_queue_up_and_only_the_named_one_is_cancelled(worker):
    with ThreadPoolExecutor() as pool:
        call = in_a_thread(pool, worker, "work")
        waiting = pool.submit(worker.call, "add", first=1, second=1)
        worker.cancel("add")
        with pytest.raises(TimeoutError):
            call.result(0.2)
        assert worker.doing == "at work"
        worker.cancel("work")
        with pytest.raises(SupersededError):
            call.result(60)
        assert waiting.result(60) == 2 and worker.doing == ""


def test_a_call_that_waited_is_not_made_when_nobody_wants_it_any_more(worker):
    assert worker.call("add", first=1, second=2) == 3
    wanted = [True]
    with ThreadPoolExecutor() as pool, worker._call_lock:
        call = pool.submit(worker.call, "add", is_wanted=lambda: bool(wanted), first=1, second=2)
        wanted.clear()
        worker._call_lock.release()
        assert isinstance(call.exception(60), SupersededError)
        worker._call_lock.acquire()


def test_a_killed_process_is_started_again_a_second_kill_is_said_and_a_silent_process_is_killed(worker, tmp_path):
    assert worker.call("kill_itself", once=str(tmp_path / "x")) == "there"
    with ThreadPoolExecutor() as pool:
        worker._tries = 1
        call = in_a_thread(pool, worker, "work")
        os.kill(worker._process.pid, signal.SIGKILL)
        with pytest.raises(WorkerError, match="killed, perhaps because memory is short"):
            call.result(60)
    assert worker.call("add", first=1, second=2) == 3
    worker._silent_s, worker._tries = 0.2, 1
    with pytest.raises(WorkerError, match="killed"):
        worker.call("hang")


def test_closing_ends_a_call_that_is_being_answered(worker):
    with ThreadPoolExecutor() as pool:
        call = in_a_thread(pool, worker, "work")
        worker.close()
        with pytest.raises(WorkerError):
            call.result(60)
