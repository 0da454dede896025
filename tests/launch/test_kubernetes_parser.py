"""Kubernetes' published schemas take the job file. Collected where kubernetes-validate is installed (see conftest)."""

import kubernetes_validate
import pytest
import yaml

from finetune.jobs import Job, job_file
from finetune.recipe import recipe_from


@pytest.mark.parametrize("launch", [{}, {"num_processes": 8, "num_machines": 2}])
@pytest.mark.parametrize("gpu", ["cpu", "rtx-4090"])
def test_every_document_is_valid_and_has_no_unknown_field(launch, gpu):
    recipe = recipe_from({"model_name_or_path": "tiny", "dataset": {"path": "support"}, "gpu": gpu, "launch": launch})
    version = kubernetes_validate.latest_version()
    documents = list(yaml.safe_load_all(job_file("kubernetes", Job(recipe, name="tiny"))))
    assert [document["kind"] for document in documents] == ["ConfigMap", "Service", "Job"]
    for document in documents:
        kubernetes_validate.validate(document, version, strict=True)
