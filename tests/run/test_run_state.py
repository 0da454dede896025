"""A run's processes and state, read from files that anything may have happened to."""

import dataclasses
import os
import signal
import subprocess
import sys

import psutil
import pytest

from finetune.cli.run import watch_run
from finetune.errors import DiskFull, RecipeError
from finetune.events import EventWriter, State
from finetune.files import write_json
from finetune.planner.plan import read_plan
from finetune.run import control
from finetune.run.directory import RunDirectory
from finetune.run.retry import adjust, adjusted_plan
from finetune.run.state import is_recorded_process, living_processes, process_record, read_state, read_stop_requests


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


def test_a_process_is_known_again_after_the_clock_was_set(monkeypatch):
    record = process_record(os.getpid())
    created = psutil.Process.create_time
    monkeypatch.setattr(psutil.Process, "create_time", lambda self: created(self) + 2.0)
    assert is_recorded_process(record)
    assert not is_recorded_process({**record, "started_ticks": record["started_ticks"] + 1})


def test_a_run_is_asked_to_stop_once_however_often_stop_is_called(tmp_path):
    run = RunDirectory(tmp_path)
    assert not control.stop(run) and not run.stop_requests.exists()
    write_json(run.process, {"supervisor": process_record(os.getpid())})
    assert control.stop(run) and control.stop(run) and control.stop(run, signal.SIGINT)
    assert read_stop_requests(run) == [signal.SIGTERM]
    assert control.stop(run, signal.SIGINT, now=True)
    assert read_stop_requests(run) == [signal.SIGTERM, signal.SIGINT]


@pytest.mark.parametrize("content", ["[]", "{", '{"no_setting": 1}', '{"gradient_accumulation_steps": "x"}'])
def test_damaged_adjustments_are_named(finished_plan, content):
    finished_plan.adjustments.write_text(content)
    with pytest.raises(RecipeError, match=r"adjustments\.json"):
        adjusted_plan(finished_plan)


def test_a_changed_settings_speed_is_not_compared_with_the_planned_ones(finished_plan):
    plan = dataclasses.replace(read_plan(finished_plan.plan), modelled_step_s=2.0)
    write_json(finished_plan.plan, plan.as_json())
    adjust(finished_plan, {"save_steps": 7})
    assert adjusted_plan(finished_plan).modelled_step_s == 2.0
    adjust(finished_plan, {"activation_checkpointing": True})
    assert adjusted_plan(finished_plan).modelled_step_s is None


def test_a_run_whose_start_can_t_be_recorded_is_not_started(finished_plan, monkeypatch):
    started = []

    def start(command, log, **options):
        started.append(subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"]))
        return started[0]

    def full(path, values):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(control, "start_detached", start)
    monkeypatch.setattr(control, "write_json", full)
    with pytest.raises(DiskFull, match="No space left"):
        control.start(finished_plan)
    assert started[0].wait(30) != 0


@pytest.fixture
def finished_plan(make_run):
    """A run directory that has not been started."""
    return make_run()


def test_who_follows_a_run_waits_until_its_ended_worker_holds_the_gpu_no_more(tmp_path, monkeypatch):
    code = "import time; time.sleep(1.5)"
    process, run = subprocess.Popen([sys.executable, "-c", code]), RunDirectory(tmp_path)
    write_json(run.process, {"worker": process_record(process.pid)})
    EventWriter(run.events).emit(State(state="finished", exit_code=0))
    monkeypatch.setattr("finetune.cli.run.open_run", lambda _: run)
    assert watch_run(str(tmp_path), as_json=True) == 0
    assert process.poll() == 0
