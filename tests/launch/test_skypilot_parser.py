"""SkyPilot's own parser takes the task. Collected where SkyPilot is installed (see conftest)."""

import pytest
import sky

from finetune.jobs import Job, job_file
from finetune.recipe import recipe_from


@pytest.mark.parametrize("launch", [{}, {"num_processes": 8, "num_machines": 2}])
@pytest.mark.parametrize("gpu", ["l4", "rtx-4090", "a100-80gb"])
def test_skypilot_reads_machines_and_gpus(tmp_path, launch, gpu):
    recipe = recipe_from({"model_name_or_path": "tiny", "dataset": {"path": "support"}, "gpu": gpu, "launch": launch})
    path = tmp_path / "task.yaml"
    path.write_text(job_file("skypilot", Job(recipe, name="tiny")))
    task = sky.Task.from_yaml(str(path))
    assert task.num_nodes == launch.get("num_machines", 1)
    (resources,) = task.resources
    assert list(resources.accelerators.values()) == [launch.get("num_processes", 1) // launch.get("num_machines", 1)]
