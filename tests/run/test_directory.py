"""A run directory is made whole or not at all; its state is read from files that anything may have happened to."""

import dataclasses
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import psutil
import pytest

from finetune.cli.run import watch_run
from finetune.errors import DiskFull, RecipeError
from finetune.events import EventWriter, State
from finetune.files import write_json
from finetune.planner.plan import read_plan
from finetune.run import control
from finetune.run.directory import RunDirectory, create, list_runs, open_run
from finetune.run.retry import adjust, adjusted_plan
from finetune.run.state import is_alive, is_recorded_process, living_processes, process_record, read_state
from finetune.system import take_lock


def fill(run):
    write_json(run.plan, {})


def test_a_taken_name_gets_a_number_also_when_eight_start_at_once(tmp_path):
    assert [create(tmp_path / "run", fill).path.name for _ in range(3)] == ["run", "run-2", "run-3"]
    names = []
    threads = [threading.Thread(target=lambda: names.append(create(tmp_path / "run", fill).path.name)) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(set(names)) == 8


def test_a_failure_while_filling_leaves_nothing_and_a_place_that_cannot_be_written_is_named(tmp_path):
    def fails(run):
        fill(run)
        raise OSError(28, "No space left on device")

    with pytest.raises(DiskFull, match="the disk is full"):
        create(tmp_path / "runs" / "run", fails)
    assert list((tmp_path / "runs").iterdir()) == []
    (tmp_path / "file").write_text("")
    with pytest.raises(DiskFull, match="file/run"):
        create(tmp_path / "file" / "run", fill)


def test_what_a_killed_maker_left_is_removed_and_what_another_makes_is_not(tmp_path):
    for name, age_s in (("killed", 1000), ("begun", 0), ("made", 1000)):
        (tmp_path / f".{name}-abc").mkdir()
        mark = tmp_path / f".{name}-abc" / ".being-made"
        mark.touch()
        os.utime(mark, (time.time() - age_s,) * 2)
    (tmp_path / ".mine").mkdir()
    lock = take_lock(tmp_path / ".made-abc" / ".being-made")
    run = create(tmp_path / "run", fill)
    assert sorted(path.name for path in tmp_path.iterdir()) == [".begun-abc", ".made-abc", ".mine", "run"]
    assert [path.name for path in run.path.iterdir()] == ["plan.json"]
    lock.release()


def test_a_directory_that_another_starter_finishes_meanwhile_is_no_fault(tmp_path, monkeypatch):
    monkeypatch.setattr(Path, "glob", lambda *_: iter([tmp_path / ".finished" / ".being-made"]))
    assert create(tmp_path / "run", fill).path.name == "run"


def test_latest_is_the_newest_run_and_what_is_no_run_is_refused(tmp_path):
    for age, name in enumerate(("new", "old")):
        run = create(tmp_path / "runs" / name, fill)
        os.utime(run.plan, (1e9 - age, 1e9 - age))
    assert open_run("latest", tmp_path / "runs").path.name == "new"
    assert [run.path.name for run in list_runs(tmp_path / "runs")] == ["new", "old"]
    for name in ("nothing", "", ".", "/", "../x"):
        with pytest.raises(RecipeError, match="not a run directory"):
            open_run(name, tmp_path)


@pytest.fixture
def run(tmp_path):
    return create(tmp_path / "run", fill)


def test_a_run_without_events_or_process_is_queued_and_one_that_was_deleted_has_ended(run):
    assert read_state(run).state == "queued"
    run.plan.unlink()
    run.path.rmdir()
    state = read_state(run)
    assert state.ended and "was deleted" in state.message


@pytest.mark.parametrize("name", ["lock", "worker.lock", "log.txt", "process.json"])
def test_a_folder_in_the_place_of_a_runs_file_is_named(run, name):
    (run.path / name).mkdir()
    with pytest.raises(RecipeError, match=f"{name} is a folder"):
        control.start(run)


@pytest.mark.parametrize(
    ("last", "process", "state"),
    [
        ("running", {"pid": 2**22 - 3, "started_s": 1.0}, "lost"),
        ("running", {"pid": os.getpid(), "started_s": 12345.0, "started_ticks": 12345}, "lost"),  # the number is another's now
        ("running", process_record(os.getpid()), "running"),
        ("finished", process_record(os.getpid()), "finished"),
    ],
)
def test_a_run_whose_process_is_gone_before_its_end_is_lost_and_says_how_to_resume(run, last, process, state):
    EventWriter(run.events).emit(State(state=last))
    write_json(run.process, {"worker": process})
    assert read_state(run).state == state and is_alive(run) == (state != "lost")
    assert ("finetune resume" in read_state(run).message) == (state == "lost")


def test_the_lock_is_held_by_one_and_dies_with_its_process(run):
    code = (
        "import sys, time; from pathlib import Path; from finetune.system import take_lock; "
        "lock = take_lock(Path(sys.argv[1])); print(lock, flush=True); time.sleep(60)"
    )
    holder = subprocess.Popen([sys.executable, "-c", code, str(run.lock)], stdout=subprocess.PIPE)
    assert holder.stdout.readline().strip() != b"None"
    assert take_lock(run.lock) is None and is_alive(run)
    holder.kill()
    holder.wait()
    assert not is_alive(run) and take_lock(run.lock) is not None


def test_a_process_is_known_after_the_clock_was_set_and_not_alive_once_it_ended_also_without_being_waited_for(monkeypatch):
    process = subprocess.Popen(["sleep", "60"])
    record = process_record(process.pid)
    assert is_recorded_process(record)
    process.kill()
    os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)
    assert not is_recorded_process(record)
    process.wait()
    assert not is_recorded_process(record)
    record = process_record(os.getpid())
    created = psutil.Process.create_time
    monkeypatch.setattr(psutil.Process, "create_time", lambda self: created(self) + 2.0)
    assert is_recorded_process(record)
    assert not is_recorded_process({**record, "started_ticks": record["started_ticks"] + 1})


@pytest.mark.parametrize(
    "content",
    ["[]", "{", "3", '{"supervisor": []}', '{"supervisor": {"pid": 1}}', '{"supervisor": {"pid": -1, "started_s": 1}}',
     '{"worker": {"pid": "x", "started_s": 1}}', '{"worker": {"pid": 1, "started_s": "x"}}', b"\xff\xfe"],
)  # fmt: skip
def test_a_damaged_process_file_names_no_process(tmp_path, content):
    (tmp_path / "process.json").write_bytes(content if isinstance(content, bytes) else content.encode())
    run = RunDirectory(tmp_path)
    assert living_processes(run) == {}
    assert read_state(run).state == "lost"
    assert control.stop(run) is False


def test_a_run_is_asked_to_stop_once_however_often_stop_is_called(tmp_path):
    code = (
        "import signal; numbers = {signal.SIGINT, signal.SIGTERM, signal.SIGRTMIN}; "
        "signal.pthread_sigmask(signal.SIG_BLOCK, numbers); "
        "print('ready', flush=True)\nwhile (number := signal.sigwait(numbers)) != signal.SIGRTMIN: print(number, flush=True)"
    )
    process, run = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True), RunDirectory(tmp_path)
    assert process.stdout.readline() == "ready\n"
    write_json(run.process, {"supervisor": process_record(process.pid)})
    assert control.stop(run)
    assert process.stdout.readline() == "15\n"
    assert control.stop(run) and control.stop(run)
    assert control.stop(run, signal.SIGINT, now=True)
    assert process.stdout.readline() == "2\n"
    process.send_signal(signal.SIGRTMIN)
    assert process.stdout.read() == ""


def test_a_worker_without_a_supervisor_is_asked_again(tmp_path):
    process, run = subprocess.Popen(["sleep", "600"]), RunDirectory(tmp_path)
    run.stop_requests.touch()
    write_json(run.process, {"worker": process_record(process.pid)})
    assert control.stop(run) and process.wait() == -signal.SIGTERM


def test_a_changed_settings_speed_is_not_compared_with_the_planned_ones_and_damaged_adjustments_are_named(make_run):
    run = make_run()
    write_json(run.plan, dataclasses.replace(read_plan(run.plan), modelled_step_s=2.0).as_json())
    adjust(run, {"save_steps": 7})
    assert adjusted_plan(run).modelled_step_s == 2.0
    adjust(run, {"activation_checkpointing": True})
    assert adjusted_plan(run).modelled_step_s is None
    for content in ("[]", "{", "{}", '{"changes": {"no_setting": 1}}', '{"changes": {"lora_r": "x"}}'):
        run.adjustments.write_text(content)
        with pytest.raises(RecipeError, match=r"adjustments\.json"):
            adjusted_plan(run)


def test_a_run_whose_start_can_t_be_recorded_is_not_started(make_run, monkeypatch):
    process = subprocess.Popen(["sleep", "600"])

    def full(path, values):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(control, "start_detached", lambda *_, **__: process)
    monkeypatch.setattr(control, "write_json", full)
    with pytest.raises(DiskFull, match="No space left"):
        control.start(make_run())
    assert process.wait(30) != 0


def test_who_follows_a_run_waits_until_its_ended_worker_holds_the_gpu_no_more(tmp_path, monkeypatch):
    process, run = subprocess.Popen(["sleep", "1.5"]), RunDirectory(tmp_path)
    write_json(run.process, {"worker": process_record(process.pid)})
    EventWriter(run.events).emit(State(state="finished", exit_code=0))
    monkeypatch.setattr("finetune.cli.run.open_run", lambda _: run)
    assert watch_run(str(tmp_path), as_json=True) == 0
    assert process.poll() == 0
