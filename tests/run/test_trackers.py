"""Trackers get each step's measured memory and the forecast, write into the run directory only, and can't end a training."""

import json
import os
import sqlite3
import subprocess
import sys
import sysconfig
from pathlib import Path

import pytest
from child_faults import in_step
from conftest import adapter_hash, events_of

from finetune.events import Memory
from finetune.planner.plan import read_plan
from finetune.requirements import installed_version

ROOT = Path(__file__).resolve().parents[2]


def installed(name):
    return pytest.mark.skipif(installed_version(name) is None, reason=f"{name} is not installed: pip install '.[trackers]'")


@pytest.fixture(autouse=True)
def nowhere_else(home, monkeypatch):
    """The home and working folder: files that a library writes outside the run directory end up here."""
    for name in [name for name in os.environ if name.startswith(("WANDB_", "TRACKIO_", "XDG_", "TENSORBOARD_"))]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("HOME", str(home))
    yield
    assert [path.name for path in home.iterdir() if path.name != "cache"] == []


def curves_of(run):
    """Tag -> {step: value} of the event files in a run directory."""
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    read = EventAccumulator(str(run.trackers / "tensorboard"), size_guidance={"scalars": 0, "tensors": 0}).Reload()
    text = read.Tensors("plan/text_summary")[0].tensor_proto.string_val[0].decode()
    return {tag: {item.step: item.value for item in read.Scalars(tag)} for tag in read.Tags()["scalars"]}, text


@pytest.mark.slow
def test_tensorboard_has_loss_memory_and_forecast_of_each_step_and_changes_nothing_of_the_result(make_run, train):
    plain, run = train.whole(make_run("eval_steps=4")), train.whole(make_run("report_to=[tensorboard]", "eval_steps=4"))
    (curves, text), plan, steps = curves_of(run), read_plan(run.plan), events_of(run, "step")
    names = {"train/loss": "loss", "train/grad_norm": "grad_norm", "train/learning_rate": "learning_rate"}
    names |= {name: name for name in ("tokens_per_s", "step_s")} | {f"memory/{name}": name for name in Memory.__annotations__}
    for tag, field in names.items():
        expected = {event.step: getattr(event, field) for event in steps if getattr(event, field) is not None}
        assert curves.get(tag, {}) == pytest.approx(expected), tag
    assert "memory/process_rss_bytes" in curves and len(steps) == 8
    for tag, value in {"forecast/peak_bytes": plan.forecast.peak_bytes, "forecast/budget_bytes": plan.budget_bytes}.items():
        assert curves[tag] == pytest.approx(dict.fromkeys(range(1, 9), value)), tag
    assert curves["eval/loss"] == pytest.approx({event.step: event.eval_loss for event in events_of(run, "eval")})
    written = json.loads(text.removeprefix("```json").removesuffix("```"))
    assert written["forecast/verdict"] == plan.verdict and written["lora_r"] == plan.settings.lora_r
    assert adapter_hash(plain) == adapter_hash(run)
    plain_names, tracked_names = ({path.name for path in directory.path.iterdir()} for directory in (plain, run))
    assert tracked_names - plain_names == {"trackers"} and plain_names < tracked_names
    assert list(run.path.parent.iterdir()) == [run.path]


@pytest.mark.slow
def test_steps_done_again_after_a_resume_are_shown_once(make_run, train):
    def breaks(*_):
        raise RuntimeError("broken at step 6")

    run = make_run("report_to=[tensorboard]")
    assert [train(run, in_step(6, breaks)), train(run)] == [1, 0]
    assert [event.step for event in events_of(run, "step")] == [1, 2, 3, 4, 5, 5, 6, 7, 8]
    losses = curves_of(run)[0]["train/loss"]
    assert losses == pytest.approx({event.step: event.loss for event in events_of(run, "step")})


@pytest.mark.slow
@pytest.mark.parametrize("opens", [True, False])
def test_a_tracker_that_breaks_or_can_not_be_opened_is_left_out_and_the_run_finishes(make_run, train, opens):
    def breaks():
        from torch.utils.tensorboard import SummaryWriter

        real = SummaryWriter.add_scalar

        def add(self, name, value, step):
            if step == 3:
                raise OSError(5, "Input/output error")
            return real(self, name, value, step)

        SummaryWriter.add_scalar = add

    run = make_run("report_to=[tensorboard]")
    if not opens:
        run.trackers.write_text("in the way")
    assert train(run, breaks) == 0
    (warning,) = [event.message for event in events_of(run, "warning") if "tensorboard" in event.message]
    assert "switched off" in warning and ("Input/output error" in warning) == opens and len(events_of(run, "step")) == 8
    assert not opens or list(curves_of(run)[0]["train/loss"]) == [1, 2]


@installed("wandb")
def test_wandb_stays_offline_and_in_the_run_directory(make_run, train):
    run = train.whole(make_run("report_to=[wandb]"))
    (folder,) = run.trackers.glob("wandb/offline-run-*")
    (file,) = folder.glob("*.wandb")
    written, plan = file.read_bytes(), read_plan(run.plan)
    for event in events_of(run, "step"):  # its values are JSON texts in protobuf records, not compressed
        for field in ("loss", "process_rss_bytes", "process_peak_rss_bytes"):
            assert json.dumps(getattr(event, field)).encode() in written
    assert json.dumps(plan.forecast.peak_bytes).encode() in written and json.dumps(plan.verdict).encode() in written
    assert not [event for event in events_of(run, "warning") if "wandb" in event.message]


@installed("trackio")
def test_trackio_stays_in_the_run_directory(make_run, train):
    run = train.whole(make_run("report_to=[trackio]"))
    with sqlite3.connect(run.trackers / "trackio" / "finetune.db") as database:
        rows = {step: json.loads(values) for step, values in database.execute("SELECT step, metrics FROM metrics")}
        (config,) = [json.loads(text) for (text,) in database.execute("SELECT config FROM configs")]
    peak = read_plan(run.plan).forecast.peak_bytes
    for event in events_of(run, "step"):
        values = rows[event.step]
        assert values["train/loss"] == event.loss and values["memory/process_rss_bytes"] == event.process_rss_bytes
        assert values["forecast/peak_bytes"] == config["forecast/peak_bytes"] == peak
    assert len(rows) == 8


def test_a_tracker_that_is_not_installed_is_refused_before_anything_is_read_or_written(tmp_path):
    packages = tmp_path / "packages"  # this environment without TensorBoard
    packages.mkdir()
    for path in Path(sysconfig.get_paths()["purelib"]).iterdir():
        if not path.name.startswith("tensorboard"):
            (packages / path.name).symlink_to(path)
    recipe = ["tiny-cpu", "report_to=[tensorboard]", "dataset.path=missing.jsonl", f"output_dir={tmp_path}/runs/x"]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT), str(packages)])}
    command = [sys.executable, "-S", "-m", "finetune", "run", *recipe]
    process = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert process.returncode == 2, process.stderr
    assert "pip install tensorboard" in " ".join(process.stderr.split()) and "missing.jsonl" not in process.stderr
    assert not (tmp_path / "runs").exists()
