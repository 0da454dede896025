"""A finished and a stopped run are listed, watched, resumed, scored and merged from their files alone."""

import json
import shutil

import pytest

from app.live import LiveRun
from finetune.run.directory import RunDirectory, list_runs
from finetune.run.state import read_state


@pytest.fixture
def both(home, kept_run):
    """The current folder has both runs below runs/."""
    for name in ("finished", "stopped"):
        kept_run(home / "runs", name)


@pytest.fixture
def answer(finetune):
    """answer(*command) -> exit code and the values of each line that it printed."""

    def ask(*command):
        code, shown = finetune(*command, "--json")
        return code, [json.loads(line) for line in shown.out.splitlines()]

    return ask


def test_they_are_listed_with_their_states_and_shown_with_memory_by_phase(both, answer):
    code, [rows] = answer("runs")
    shown = {row["path"]: (row["state"], row["step"], row["total_steps"]) for row in rows}
    assert code == 0
    assert shown == {"runs/finished": ("finished", 6, 6), "runs/stopped": ("paused", 2, 6)}
    assert all(isinstance(row["loss"], float) for row in rows)
    code, [shown] = answer("runs", "show", "finished", "--memory")
    assert code == 0 and {"load", "train", "evaluate", "save"} <= set(shown["peaks"])
    assert shown["forecast"]["predicted_allocated_bytes"] > 0
    assert shown["forecast_peaks"]["train"]["allocated_bytes"] > 0 and shown["out_of_memory"] is None


@pytest.mark.parametrize(("name", "exit_code", "steps"), [("finished", 0, 6), ("stopped", 130, 2)])
def test_watching_shows_what_happened(both, answer, name, exit_code, steps):
    code, [*events, end] = answer("watch", name)
    assert (code, end["state"], end["exit_code"]) == (exit_code, name.replace("stopped", "paused"), exit_code)
    assert [event["step"] for event in events if event["kind"] == "step"] == list(range(1, steps + 1))
    assert len([event for event in events if event["kind"] == "checkpoint"]) >= steps // 2


def test_the_page_follows_them(both, tmp_path):
    for run in list_runs():
        live = LiveRun(run)
        live.refresh()
        assert live.digest.step == read_state(run).step and live.state() == read_state(run)
        assert len(live.digest.series["loss"].bins) == live.digest.step
        assert live.plan().total_steps == 6


@pytest.mark.slow
def test_a_stopped_run_continues_to_its_end(both, answer):
    code, [*events, end] = answer("resume", "stopped")
    assert (code, end["state"]) == (0, "finished")
    (start,) = [event for event in events if event["kind"] == "start"]
    assert (start["resumed_from"], start["exact"]) == ("checkpoint-2", True)
    new = {event["step"]: event["loss"] for event in events if event["kind"] == "step"}
    _, [*unbroken, _] = answer("watch", "finished")
    once = {event["step"]: event["loss"] for event in unbroken if event["kind"] == "step"}
    assert new == pytest.approx({step: once[step] for step in (3, 4, 5, 6)}, rel=1e-3)


@pytest.fixture
def run(home, kept_run):
    return RunDirectory(kept_run(home / "runs"))


@pytest.mark.slow
def test_without_its_base_model_a_run_is_reported_and_compared_and_its_adapter_pushed(run, home, finetune):
    values = json.loads(run.plan.read_text())
    values["plan"]["model_name_or_path"] = str(home / "nowhere")
    run.plan.write_text(json.dumps(values))
    shutil.copytree(run.path, run.path.with_name("other"))
    assert finetune("report", "finished")[0] == 0
    code, output = finetune("push", "finished", "alice/lora", "--dry-run")
    assert code == 0 and "README.md" in output and "nowhere" not in output
    assert finetune("compare", "finished", "other")[0] == 0 and finetune("runs", "show", "finished", "--memory")[0] == 0


@pytest.mark.slow
def test_a_base_model_of_the_hub_that_can_not_be_fetched_is_no_problem_of_the_disk(run, finetune):
    run.plan.write_text(run.plan.read_text().replace('"model_name_or_path": "tiny"', '"model_name_or_path": "Qwen/Qwen3-8B"'))
    code, output = finetune("merge", "finished")
    assert code == 2 and "Qwen/Qwen3-8B: Cannot find" in output and "Free some space" not in output
    assert not (run.path / ".merged").exists()
