"""Fit: what quantising costs is measured by a process that can be stopped, and shown with its interval."""

import re
import time
from html import unescape
from types import SimpleNamespace

import psutil
import pytest

from app.background.tasks import Task, Tasks
from app.pages.fit_measured import press, tick
from app.planning.draft import Draft
from app.workspace import Workspace

RECIPE = "model_name_or_path: tiny\ndataset: {path: support, max_rows: 60, test_split_size: 20}\n"


def page_with(tmp_path, recipe):
    """What `press` needs."""
    workspace = Workspace(tmp_path, tmp_path / "runs")
    draft = Draft(workspace)
    draft.write(recipe)
    return SimpleNamespace(draft=draft, tasks=Tasks(workspace)), Task(workspace.folder("measured"))


def ended(task):
    """The answer at the end."""
    deadline_s = time.monotonic() + 120
    while task.status()["state"] == "running" and time.monotonic() < deadline_s:
        time.sleep(0.1)
    button, shown, timer = tick(task)
    assert button.value.startswith("Measure") and not timer.active
    return unescape(shown)


@pytest.mark.slow
def test_the_loss_of_each_format_is_shown_with_its_interval(tmp_path):
    context, task = page_with(tmp_path, RECIPE + "gpu: cpu\n")
    button, shown, timer = press(context, task)
    assert button.value == "Stop measuring" and "Measuring for" in shown and timer.active
    shown = ended(task)
    assert re.search(r"on 20 held-out rows the base model has a loss of [\d.]+ in 32 bit; int8 .*; NF4 ", shown)
    assert shown.count("95 % interval") == 2


@pytest.mark.parametrize(("setting", "problem"), [("gpu: rtx-4090", "RTX 4090; this machine has"), ("lora_r: -1", "lora_r")])
def test_a_measurement_that_can_not_be_is_refused_in_words(tmp_path, setting, problem):
    context, task = page_with(tmp_path, f"{RECIPE}{setting}\n")
    press(context, task)
    assert problem in ended(task)


def test_a_folder_that_can_not_be_written_is_said(tmp_path):
    context, task = page_with(tmp_path, RECIPE + "gpu: cpu\n")
    (task.path / "recipe.yaml").mkdir()
    _, shown, timer = press(context, task)
    assert "recipe.yaml" in shown and not timer.active


def test_a_second_press_ends_it_and_its_processes(tmp_path):
    context, task = page_with(tmp_path, RECIPE + "gpu: cpu\n")
    press(context, task)
    process = psutil.Process(task.status()["process"]["pid"])
    time.sleep(2)
    family = [process, *process.children(recursive=True)]
    press(context, task)
    assert "stopped" in ended(task) and psutil.wait_procs(family, timeout=30)[1] == []
