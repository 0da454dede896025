"""A run directory is made whole or not at all, and its state is derived from files and processes."""

import os
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from finetune.errors import DiskFull, RecipeError
from finetune.events import EventWriter, State
from finetune.files import write_json
from finetune.run import control
from finetune.run.directory import create, list_runs, open_run
from finetune.run.state import is_alive, is_recorded_process, process_record, read_state
from finetune.system import take_lock


def fill(run):
    write_json(run.plan, {})


def test_a_taken_name_gets_a_number(tmp_path):
    assert [create(tmp_path / "run", fill).path.name for _ in range(3)] == ["run", "run-2", "run-3"]


def test_a_failure_while_filling_leaves_nothing(tmp_path):
    def fails(run):
        fill(run)
        raise OSError(28, "No space left on device")

    with pytest.raises(DiskFull, match="the disk is full"):
        create(tmp_path / "runs" / "run", fails)
    assert list((tmp_path / "runs").iterdir()) == []


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


def test_a_place_that_cannot_be_written_is_named(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(DiskFull, match="file/run"):
        create(tmp_path / "file" / "run", fill)


def test_two_starters_at_once_get_two_directories(tmp_path):
    names = []
    threads = [threading.Thread(target=lambda: names.append(create(tmp_path / "run", fill).path.name)) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(set(names)) == 8


def test_a_directory_that_another_starter_finishes_meanwhile_is_no_fault(tmp_path, monkeypatch):
    monkeypatch.setattr(Path, "glob", lambda *_: iter([tmp_path / ".finished" / ".being-made"]))
    assert create(tmp_path / "run", fill).path.name == "run"


def test_latest_is_the_newest_run(tmp_path):
    for age, name in enumerate(("new", "old")):
        run = create(tmp_path / "runs" / name, fill)
        os.utime(run.plan, (1e9 - age, 1e9 - age))
    assert open_run("latest", tmp_path / "runs").path.name == "new"
    assert [run.path.name for run in list_runs(tmp_path / "runs")] == ["new", "old"]


@pytest.mark.parametrize("name", ["nothing", "", ".", "/", "../x"])
def test_what_is_no_run_is_refused(tmp_path, name):
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
        "import sys, time; from pathlib import Path; from finetune.run.directory import RunDirectory; "
        "from finetune.system import take_lock; lock = take_lock(RunDirectory(Path(sys.argv[1])).lock); "
        "print(lock, flush=True); "
        "time.sleep(60)"
    )
    holder = subprocess.Popen([sys.executable, "-c", code, str(run.path)], stdout=subprocess.PIPE)
    assert holder.stdout.readline().strip() != b"None"
    assert take_lock(run.lock) is None and is_alive(run)
    holder.kill()
    holder.wait()
    assert not is_alive(run) and take_lock(run.lock) is not None


def test_a_process_that_has_ended_but_was_not_waited_for_is_not_alive():
    process = subprocess.Popen(["sleep", "60"])
    record = process_record(process.pid)
    assert is_recorded_process(record)
    process.kill()
    os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)
    assert not is_recorded_process(record)
    process.wait()
    assert not is_recorded_process(record)
