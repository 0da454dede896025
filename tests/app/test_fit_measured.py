"""Fit: what quantising costs is measured by a process that can be stopped, and shown with its interval."""

import re
import time
from html import unescape
from types import SimpleNamespace

import psutil
import pytest

from app.pages.fit_measured import _Measurements
from app.planning.draft import Draft
from app.workspace import Workspace

RECIPE = "model_name_or_path: tiny\ndataset: {path: support, max_rows: 60, test_split_size: 20}\n"


def measurements_of(tmp_path, recipe):
    workspace = Workspace(tmp_path, tmp_path / "runs")
    draft = Draft(workspace)
    draft.write(recipe)
    return _Measurements(SimpleNamespace(draft=draft, workspace=workspace))


def ended(measurements):
    """What is shown at the end."""
    measurements._newest.wait(timeout=120)
    button, shown, timer = measurements.tick()
    assert button.value.startswith("Measure") and not timer.active
    return unescape(shown)


@pytest.mark.slow
def test_the_loss_of_each_format_is_shown_with_its_interval(tmp_path):
    measurements = measurements_of(tmp_path, RECIPE + "gpu: cpu\n")
    button, shown, timer = measurements.press()
    assert button.value == "Stop measuring" and "Measuring for" in shown and timer.active
    shown = ended(measurements)
    assert "on 20 rows" in shown and re.findall(r'<td class="left">([^<]*)</td>', shown) == ["32 bit", "int8", "NF4"]
    assert len(re.findall(r"[+-][\d.]+ \([+-][\d.]+ to [+-][\d.]+\)", shown)) == 2


def test_a_gpu_that_is_not_here_is_refused_in_words(tmp_path):
    measurements = measurements_of(tmp_path, RECIPE + "gpu: rtx-4090\n")
    measurements.press()
    assert "rtx-4090, which is not in this machine" in ended(measurements)


def test_a_folder_that_can_not_be_written_is_said(tmp_path):
    measurements = measurements_of(tmp_path, RECIPE + "gpu: cpu\n")
    (measurements._context.workspace.folder("measured") / "recipe.yaml").mkdir()
    _, shown, timer = measurements.press()
    assert "recipe.yaml" in shown and not timer.active


def test_a_second_press_ends_it_and_its_processes(tmp_path):
    measurements = measurements_of(tmp_path, RECIPE + "gpu: cpu\n")
    measurements.press()
    process = psutil.Process(measurements._newest.pid)
    time.sleep(0.5)
    family = [process, *process.children(recursive=True)]
    _, shown, _ = measurements.press()
    assert "stopped" in shown and not any(member.is_running() for member in family)
