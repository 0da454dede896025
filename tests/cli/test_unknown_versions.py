"""A library outside this version's bounds is refused, with the fix, by all that forecasts or trains.

Nothing is patched: the other version has a dist-info folder on the path, as an installed one has.
"""

import os
import subprocess
import sys

import pytest

from finetune.requirements import packages

BOUNDS = {package.requirement.name: str(package.requirement.specifier) for package in packages()}


@pytest.fixture
def finetune(tmp_path):
    """finetune(*arguments, transformers="6.0.0") -> the ended command, in an environment with these versions installed."""

    def run(*arguments, **versions):
        for name, version in versions.items():
            folder = tmp_path / "packages" / f"{name}-{version}.dist-info"
            folder.mkdir(parents=True, exist_ok=True)
            (folder / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n")
        path = os.pathsep.join([str(tmp_path / "packages"), *filter(None, sys.path)])
        return subprocess.run(
            [sys.executable, "-m", "finetune", *arguments], cwd=tmp_path, env={**os.environ, "PYTHONPATH": path},
            capture_output=True, text=True,
        )  # fmt: skip

    return run


@pytest.mark.slow
@pytest.mark.parametrize("command", ["plan", pytest.param("run", marks=pytest.mark.exhaustive)])
def test_versions_that_the_forecast_does_not_know_are_all_named_with_the_fix(finetune, tmp_path, command):
    process = finetune(command, "tiny-cpu", "dataset.path=missing.jsonl", transformers="6.0.0", trl="0.9.1")
    output = " ".join(process.stderr.split())
    assert process.returncode == 2 and f"transformers 6.0.0, needed {BOUNDS['transformers']}" in output
    assert f"pip install 'transformers{BOUNDS['transformers']}' 'trl{BOUNDS['trl']}'" in output
    assert "trl 0.9.1, needed" in output and "missing.jsonl" not in output
    assert [path.name for path in tmp_path.iterdir()] == ["packages"]


def test_a_run_is_not_resumed_with_other_versions_but_help_and_lists_work_with_any(finetune, tmp_path):
    (tmp_path / "runs" / "x").mkdir(parents=True)
    (tmp_path / "runs" / "x" / "plan.json").write_text("{}")
    process = finetune("resume", "x", peft="1.0.0")
    assert process.returncode == 2 and "peft 1.0.0" in process.stderr
    assert [path.name for path in (tmp_path / "runs" / "x").iterdir()] == ["plan.json"]
    assert finetune("--help", torch="2.99.0").returncode == 0
    assert finetune("recipes", torch="2.99.0").returncode == 0


@pytest.mark.slow
def test_doctor_fails_with_the_same_line(finetune):
    process = finetune("doctor", torch="2.99.0")
    assert process.returncode == 1 and f"torch 2.99.0, needed {BOUNDS['torch']}" in process.stdout
    assert f"pip install 'torch{BOUNDS['torch']}'" in process.stdout


@pytest.mark.slow
def test_what_does_not_forecast_may_have_any_version(finetune):
    process = finetune("run", "tiny-cpu", "dataset.path=missing.jsonl", gradio="99.0", torch="2.13.0+cu128")
    assert process.returncode == 4 and "missing.jsonl" in process.stderr
