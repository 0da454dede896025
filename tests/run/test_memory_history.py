"""record_memory_history: the allocator's history is written after the highest peak, when it is asked for, and at the end."""

import errno
import os
import threading
from pathlib import Path

import pytest

from finetune.card import cuda
from finetune.events import Memory
from finetune.files import write_json
from finetune.run.directory import RunDirectory
from finetune.run.memory import MemoryHistory, request_history
from finetune.run.state import process_record


@pytest.fixture
def run(tmp_path):
    return RunDirectory(tmp_path)


@pytest.fixture
def written(monkeypatch):
    """Names of the files that were written, in order."""
    names = []

    def write(path):
        names.append(Path(path).stem.removeprefix("memory_snapshot-"))
        Path(path).write_text(f"history {len(names)}")

    monkeypatch.setattr(cuda, "start_history", lambda _: None)
    monkeypatch.setattr(cuda, "write_history", write)
    return names


def steps(history, *peaks):
    for number, peak in enumerate(peaks, 1):
        history.after_step(Memory(peak_allocated_bytes=peak), number, last_step=8)


def test_the_step_with_the_highest_peak_is_in_a_file_from_the_second_step_on(run, written):
    history = MemoryHistory(run, print, records=True)
    steps(history, 700, 600)
    assert written == ["peak"]
    steps(history, 300, 705, 300)  # no higher than by 1 %
    assert written == ["peak"]
    steps(history, 300, 800, 300)
    history.end()
    assert written == ["peak", "peak", "end"]
    assert [path.read_text() for path in run.snapshots.values()] == ["history 2", "history 3"]


def test_a_run_of_one_step_has_its_file_too(run, written):
    MemoryHistory(run, print, records=True).after_step(Memory(peak_allocated_bytes=1), 1, last_step=1)
    assert written == ["peak"]


def test_a_run_that_records_none_writes_none(run, written):
    history = MemoryHistory(run, print, records=False)
    history.start()
    steps(history, 1, 2, 3)
    history.end()
    assert written == [] == list(run.path.iterdir())


def test_a_history_that_is_asked_for_is_written_after_the_step(run, written):
    write_json(run.process, {"worker": process_record(os.getpid())})
    history = MemoryHistory(run, print, records=True)
    steps(history, 1, 1)
    waits = threading.Event()
    asking = threading.Thread(target=request_history, args=(run, 900.0, lambda _: waits.set()))
    asking.start()
    assert waits.wait(900)
    steps(history, 1)
    asking.join()
    assert written == ["peak", "now"] and not run.snapshot_request.exists()


def test_nobody_waits_for_a_run_that_has_ended_or_takes_too_long(run):
    assert request_history(run, 900.0, print) and not run.snapshot_request.exists()
    write_json(run.process, {"worker": process_record(os.getpid())})
    assert not request_history(run, 0.0, print)


def test_a_full_disk_is_a_warning_and_leaves_nothing(run, written, monkeypatch):
    def fill(path):
        Path(path).touch()
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(cuda, "write_history", fill)
    warnings = []
    MemoryHistory(run, warnings.append, records=True).end()
    assert warnings == ["the allocator's history could not be written: No space left on device"]
    assert list(run.path.iterdir()) == []
