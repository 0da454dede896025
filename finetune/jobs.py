"""Job files: a recipe for Slurm, Kubernetes or SkyPilot. Each machine runs `finetune run` with its own rank."""

from __future__ import annotations

import re
import shlex
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import yaml

from finetune.card.find import catalogue, skypilot_name
from finetune.card.vendors import vendor_of
from finetune.errors import RecipeError, exit_codes
from finetune.recipe import write_recipe
from finetune.settings import AUTO, Recipe

#: Seconds between the engine's SIGTERM and the end of the job, for the run to finish its step, save and seal.
GRACE_S = 300


@dataclass(frozen=True)
class Job:
    """Contents of a job file: container `image`, time limit in `hours`, `volume` claim for the files."""

    recipe: Recipe
    name: str
    image: str = "finetune:latest"
    hours: int = 24
    volume: str = "finetune-data"

    @property
    def machines(self) -> int:
        """Number of machines."""
        return self.recipe.launch.num_machines

    @property
    def gpus(self) -> int:
        """GPUs per machine; 0 on CPU."""
        return 0 if self.recipe.gpu == "cpu" else self.recipe.launch.num_processes // self.machines

    @property
    def resource(self) -> str:
        """What a container of Kubernetes asks for to get a GPU."""
        return vendor_of(catalogue().get(self.recipe.gpu)).kubernetes_resource

    @property
    def port(self) -> int:
        """Port of machine 0."""
        return self.recipe.launch.main_process_port

    @property
    def label(self) -> str:
        """The name in the form DNS and batch systems accept: lower case letters, digits and dashes, cut to 40."""
        slug = re.sub(r"[^a-z0-9]+", "-", self.name.lower()).strip("-")[:40].strip("-")
        return f"finetune-{slug or 'run'}"

    def command(self, *, rank: str, address: str, recipe: str = "recipe.yaml", run: str = "runs/") -> str:
        """Shell lines that start or resume the run. `rank`, `address`: shell expressions for the rank and machine 0's address.

        Each machine has its own run directory; its name begins with `run`.
        """
        launch = [f'launch.machine_rank="{rank}"', f'launch.main_process_ip="{address}"'] if self.machines > 1 else []
        directory = f"{run}{self.label}" + (f"-machine-{rank}" if self.machines > 1 else "")
        start = " ".join(["finetune run", recipe, *launch, "gpu=auto" if self.gpus else "gpu=cpu", 'output_dir="$run"'])
        return f'run="{directory}"\nif [ -d "$run" ]; then exec finetune resume "$run"; fi\nexec {start}\n'

    def recipe_text(self) -> str:
        """The recipe as YAML, without the settings that differ between machines."""
        values = self.recipe.model_dump(exclude_unset=True, mode="json")
        for key in ("machine_rank", "main_process_ip"):
            values.get("launch", {}).pop(key, None)
        values.pop("output_dir", None)
        return write_recipe(Recipe.model_validate(values))


def slurm(job: Job) -> str:
    """A script for `sbatch`: one task per machine; before the time limit it stops with a checkpoint and is queued again."""
    gpus_line = f"#SBATCH --gpus-per-node={job.gpus}\n" if job.gpus else ""
    command = job.command(
        rank="$SLURM_NODEID", address="$main_address", recipe='recipe-"$SLURM_JOB_ID".yaml', run="runs/$SLURM_JOB_ID-"
    )
    return f"""#!/usr/bin/env bash
# sbatch {job.label}.sbatch      The folder it is started in, with the data, must be on a disk that every machine sees, and
# finetune on every machine's PATH. Add what your site asks for: --partition, --account, --mem, --cpus-per-task.
#SBATCH --job-name={job.label}
#SBATCH --nodes={job.machines}
#SBATCH --ntasks-per-node=1
{gpus_line}#SBATCH --time={job.hours}:00:00
#SBATCH --signal=TERM@{GRACE_S}
#SBATCH --requeue
#SBATCH --open-mode=append
#SBATCH --output={job.label}-%j.log
set -euo pipefail
cat > recipe-"$SLURM_JOB_ID".yaml <<'RECIPE'
{job.recipe_text()}RECIPE
main_address=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)
export main_address
code=0
srun bash -c {shlex.quote(command)} || code=$?
if [ "$code" = 143 ]; then scontrol requeue "$SLURM_JOB_ID"; fi
exit "$code"
"""


def kubernetes(job: Job) -> str:
    """A ConfigMap with the recipe, a headless Service for the machines to find each other, and an indexed Job."""
    address = f"{job.label}-0.{job.label}" if job.machines > 1 else "127.0.0.1"
    command = job.command(rank="$JOB_COMPLETION_INDEX", address=address)
    container: dict[str, Any] = {
        "name": "finetune", "image": job.image, "workingDir": "/data",
        "command": ["tini", "--", "bash", "-ec", "cp /recipe/recipe.yaml recipe.yaml\n" + command],
        "volumeMounts": [
            {"name": "data", "mountPath": "/data"}, {"name": "recipe", "mountPath": "/recipe"},
            {"name": "shared-memory", "mountPath": "/dev/shm"},
        ],
    }  # fmt: skip
    if job.gpus:
        container["resources"] = {"limits": {job.resource: job.gpus}}
    pod = {
        "restartPolicy": "Never", "terminationGracePeriodSeconds": GRACE_S,
        "securityContext": {"runAsUser": 1000, "runAsGroup": 1000, "fsGroup": 1000, "runAsNonRoot": True},
        "subdomain": job.label, "containers": [container],
        "volumes": [
            {"name": "data", "persistentVolumeClaim": {"claimName": job.volume}},
            {"name": "recipe", "configMap": {"name": job.label}},
            {"name": "shared-memory", "emptyDir": {"medium": "Memory"}},
        ],
    }  # fmt: skip
    labels = {"app": job.label}
    documents = [
        _manifest("v1", "ConfigMap", job, {"data": {"recipe.yaml": job.recipe_text()}}),
        _manifest("v1", "Service", job, {"spec": {"clusterIP": "None", "selector": labels, "publishNotReadyAddresses": True}}),
        _manifest("batch/v1", "Job", job, {"spec": {
            "completions": job.machines, "parallelism": job.machines, "completionMode": "Indexed", "backoffLimit": 3,
            "activeDeadlineSeconds": job.hours * 3600, "podFailurePolicy": {"rules": [_PERMANENT_FAILURES]},
            "template": {"metadata": {"labels": labels}, "spec": pod},
        }}),
    ]  # fmt: skip
    head = (
        f"# kubectl apply -f {job.label}.yaml      The claim {job.volume} holds the data; more machines need ReadWriteMany.\n"
    )
    return head + "---\n".join(_yaml(document) for document in documents)


#: After other errors a retry resumes from the checkpoint.
_PERMANENT_FAILURES = {
    "action": "FailJob",
    "onExitCodes": {"containerName": "finetune", "operator": "In", "values": exit_codes(permanent=True)},
}


class _Dumper(yaml.SafeDumper):
    """Writes multi-line texts as blocks, so that they can be read and edited."""


_Dumper.add_representer(
    str, lambda dumper, text: dumper.represent_scalar("tag:yaml.org,2002:str", text, style="|" if "\n" in text else None)
)


def _yaml(values: dict[str, Any]) -> str:
    return yaml.dump(values, Dumper=_Dumper, sort_keys=False, allow_unicode=True, width=120)


def _manifest(version: str, kind: str, job: Job, content: dict[str, Any]) -> dict[str, Any]:
    return {"apiVersion": version, "kind": kind, "metadata": {"name": job.label}, **content}


def skypilot(job: Job) -> str:
    """A task for `sky launch`: the current folder is uploaded; runs stay on the machines until copied back."""
    resources: dict[str, object] = {"image_id": f"docker:{job.image}"}
    if job.gpus:
        resources["accelerators"] = f"{_accelerator(job.recipe.gpu)}:{job.gpus}"
    setup = f"cat > recipe.yaml <<'RECIPE'\n{job.recipe_text()}RECIPE\n"
    run = (
        'main_address=$(echo "$SKYPILOT_NODE_IPS" | head -n 1)\n'
        + job.command(rank="$SKYPILOT_NODE_RANK", address="$main_address")
    )  # fmt: skip
    task = {"name": job.label, "num_nodes": job.machines, "workdir": ".", "resources": resources, "setup": setup, "run": run}
    return f"# sky launch {job.label}.yaml      From the folder with the data.\n{_yaml(task)}"


def _accelerator(gpu: str) -> str:
    """The GPU as SkyPilot calls it. Raises RecipeError for `auto`: a GPU to rent must be named."""
    if gpu == AUTO:
        raise RecipeError("gpu is auto, and SkyPilot must know which GPU to rent", "Set it, for example gpu=rtx-4090.")
    return skypilot_name(gpu)


ENGINES: dict[str, Callable[[Job], str]] = {"slurm": slurm, "kubernetes": kubernetes, "skypilot": skypilot}


def job_file(engine: str, job: Job) -> str:
    """The text of the job file for one of ENGINES."""
    return ENGINES[engine](job)
