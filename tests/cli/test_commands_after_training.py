"""What comes after training ends with its exit code where the base model is gone, and a report that is killed is none."""

import json
import shutil

import pytest

from finetune.run.directory import RunDirectory


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
