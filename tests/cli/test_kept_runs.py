"""A finished and a stopped run are listed, watched, resumed, scored and merged from their files alone."""

import json
from pathlib import Path

import pytest

from app.live import LiveRun
from finetune.planner.plan import read_plan
from finetune.run.directory import list_runs, open_run
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


def test_they_are_listed_with_their_states(both, answer):
    code, [rows] = answer("runs")
    shown = {row["path"]: (row["state"], row["step"], row["total_steps"]) for row in rows}
    assert code == 0
    assert shown == {"runs/finished": ("finished", 6, 6), "runs/stopped": ("paused", 2, 6)}
    assert all(isinstance(row["loss"], float) for row in rows)


@pytest.mark.parametrize(("name", "exit_code", "steps"), [("finished", 0, 6), ("stopped", 130, 2)])
def test_watching_shows_what_happened(both, answer, name, exit_code, steps):
    code, [*events, end] = answer("watch", name)
    assert (code, end["state"], end["exit_code"]) == (exit_code, name.replace("stopped", "paused"), exit_code)
    assert [event["step"] for event in events if event["kind"] == "step"] == list(range(1, steps + 1))
    assert len([event for event in events if event["kind"] == "checkpoint"]) >= steps // 2


def test_their_plans_are_read(both):
    plan = read_plan(open_run("finished").plan)
    assert (plan.verdict, plan.total_steps, plan.card.is_cpu) == ("fits", 6, True)
    assert (plan.settings.lora_r, plan.settings.effective_batch_size) == (1, 8)
    assert plan.data.rows == 24 and plan.data.eval_rows == 6
    assert plan.forecast.allocated_bytes > 0 and plan.forecast.parts["weights"] > 0


def test_the_page_follows_them(both, tmp_path):
    for run in list_runs():
        live = LiveRun(run)
        live.wait()
        assert live.digest.step == read_state(run).step and live.state() == read_state(run)
        assert len(live.digest.series["loss"].bins) == live.digest.step
        assert live.plan().total_steps == 6


def test_memory_by_phase_is_shown(both, answer):
    code, [shown] = answer("runs", "show", "finished", "--memory")
    assert code == 0 and {"load", "train", "evaluate", "save"} <= set(shown["peaks"])
    assert shown["forecast"]["predicted_allocated_bytes"] > 0
    assert shown["forecast_peaks"]["train"]["allocated_bytes"] > 0 and shown["out_of_memory"] is None


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


@pytest.mark.slow
def test_a_finished_run_is_scored_and_merged(both, answer):
    code, [*_, scores] = answer("eval", "finished")
    assert code == 0 and scores
    code, _ = answer("merge", "finished")
    assert code == 0 and list(Path("runs/finished").rglob("model*.safetensors"))
