"""A recipe as a job file of Slurm, Kubernetes or SkyPilot. Each machine runs `finetune run` with its own number."""

from __future__ import annotations

import re
import shlex
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import yaml

from finetune.errors import RecipeError
from finetune.recipe import AUTO, Recipe, write_recipe

#: Seconds that an engine leaves a run to finish its step, save and seal when it ends the job.
GRACE_S = 300


@dataclass(frozen=True)
class Job:
    """What a job file is made of: `image` the container, `hours` the longest time, `volume` the claim that keeps the files."""

    recipe: Recipe
    name: str
    image: str = "finetune:latest"
    hours: int = 24
    volume: str = "finetune-data"

    @property
    def machines(self) -> int:
        """Machines of the job."""
        return self.recipe.launch.num_machines

    @property
    def cards(self) -> int:
        """Cards on each machine; 0 on processors."""
        return 0 if self.recipe.gpu == "cpu" else self.recipe.launch.num_processes // self.machines

    @property
    def port(self) -> int:
        """Where machine 0 is found by the others."""
        return self.recipe.launch.main_process_port

    @property
    def label(self) -> str:
        """The name as DNS and batch systems take it: lower case, digits and dashes, at most 40 of them."""
        plain = re.sub(r"[^a-z0-9]+", "-", self.name.lower()).strip("-")[:40].strip("-")
        return f"finetune-{plain or 'run'}"

    def command(self, *, number: str, address: str, recipe: str = "recipe.yaml", run: str = "runs/") -> str:
        """Shell lines that start the run, or go on with it. `number`, `address`: the machine's, as the engine's shell words.

        Each machine has a run directory of its own, whose name begins with `run`.
        """
        launch = [f'launch.machine_rank="{number}"', f'launch.main_process_ip="{address}"'] if self.machines > 1 else []
        directory = f"{run}{self.label}" + (f"-machine-{number}" if self.machines > 1 else "")
        start = " ".join(["finetune run", recipe, *launch, "gpu=auto" if self.cards else "gpu=cpu", 'output_dir="$run"'])
        return f'run="{directory}"\nif [ -d "$run" ]; then exec finetune resume "$run"; fi\nexec {start}\n'

    def recipe_text(self) -> str:
        """The recipe as YAML, without what differs from machine to machine."""
        values = self.recipe.model_dump(exclude_unset=True, mode="json")
        for key in ("machine_rank", "main_process_ip"):
            values.get("launch", {}).pop(key, None)
        values.pop("output_dir", None)
        return write_recipe(Recipe.model_validate(values))


def slurm(job: Job) -> str:
    """A script for `sbatch`: a task on each machine, stopped with a checkpoint before the time is up, and queued again then."""
    cards = f"#SBATCH --gpus-per-node={job.cards}\n" if job.cards else ""
    command = job.command(
        number="$SLURM_NODEID", address="$main_address", recipe='recipe-"$SLURM_JOB_ID".yaml', run="runs/$SLURM_JOB_ID-"
    )
    return f"""#!/usr/bin/env bash
# sbatch {job.label}.sbatch      The folder it is started in, with the data, must be on a disk that every machine sees, and
# finetune on every machine's PATH. Add what your site asks for: --partition, --account, --mem, --cpus-per-task.
#SBATCH --job-name={job.label}
#SBATCH --nodes={job.machines}
#SBATCH --ntasks-per-node=1
{cards}#SBATCH --time={job.hours}:00:00
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
    """A ConfigMap with the recipe, a headless Service by which machines find each other, and an indexed Job."""
    address = f"{job.label}-0.{job.label}" if job.machines > 1 else "127.0.0.1"
    command = job.command(number="$JOB_COMPLETION_INDEX", address=address)
    container: dict[str, Any] = {
        "name": "finetune", "image": job.image, "workingDir": "/data",
        "command": ["tini", "--", "bash", "-ec", "cp /recipe/recipe.yaml recipe.yaml\n" + command],
        "volumeMounts": [
            {"name": "data", "mountPath": "/data"}, {"name": "recipe", "mountPath": "/recipe"},
            {"name": "shared-memory", "mountPath": "/dev/shm"},
        ],
    }  # fmt: skip
    if job.cards:
        container["resources"] = {"limits": {"nvidia.com/gpu": job.cards}}
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
        _kind("v1", "ConfigMap", job, {"data": {"recipe.yaml": job.recipe_text()}}),
        _kind("v1", "Service", job, {"spec": {"clusterIP": "None", "selector": labels, "publishNotReadyAddresses": True}}),
        _kind("batch/v1", "Job", job, {"spec": {
            "completions": job.machines, "parallelism": job.machines, "completionMode": "Indexed", "backoffLimit": 3,
            "activeDeadlineSeconds": job.hours * 3600, "podFailurePolicy": {"rules": [_HOPELESS]},
            "template": {"metadata": {"labels": labels}, "spec": pod},
        }}),
    ]  # fmt: skip
    head = (
        f"# kubectl apply -f {job.label}.yaml      The claim {job.volume} holds the data; more machines need ReadWriteMany.\n"
    )
    return head + "---\n".join(_yaml(document) for document in documents)


#: Ends that another try would reach, too: a bad recipe or data, no room for it, divergence. Others go on from their checkpoint.
_HOPELESS = {
    "action": "FailJob", "onExitCodes": {"containerName": "finetune", "operator": "In", "values": [2, 3, 4, 5, 6]},
}  # fmt: skip


class _Dumper(yaml.SafeDumper):
    """Texts of several lines as blocks, so that a person can read and change them."""


_Dumper.add_representer(
    str, lambda dumper, text: dumper.represent_scalar("tag:yaml.org,2002:str", text, style="|" if "\n" in text else None)
)


def _yaml(values: dict[str, Any]) -> str:
    return yaml.dump(values, Dumper=_Dumper, sort_keys=False, allow_unicode=True, width=120)


def _kind(version: str, kind: str, job: Job, content: dict[str, Any]) -> dict[str, Any]:
    return {"apiVersion": version, "kind": kind, "metadata": {"name": job.label}, **content}


def skypilot(job: Job) -> str:
    """A task for `sky launch`: the folder it is started in goes along; runs stay on the machines until they are copied back."""
    resources: dict[str, object] = {"image_id": f"docker:{job.image}"}
    if job.cards:
        resources["accelerators"] = f"{_accelerator(job.recipe.gpu)}:{job.cards}"
    setup = f"cat > recipe.yaml <<'RECIPE'\n{job.recipe_text()}RECIPE\n"
    run = (
        'main_address=$(echo "$SKYPILOT_NODE_IPS" | head -n 1)\n'
        + job.command(number="$SKYPILOT_NODE_RANK", address="$main_address")
    )  # fmt: skip
    task = {"name": job.label, "num_nodes": job.machines, "workdir": ".", "resources": resources, "setup": setup, "run": run}
    return f"# sky launch {job.label}.yaml      From the folder with the data.\n{_yaml(task)}"


#: Cards whose name there is not the catalogue's without its dashes.
_SKYPILOT_NAMES = {
    "a100-40gb": "A100", "a100-80gb": "A100-80GB", "h100-80gb": "H100", "h100-pcie": "H100", "v100-16gb": "V100",
    "v100-32gb": "V100-32GB", "rtx-4000-ada": "RTX4000-Ada", "rtx-5000-ada": "RTX5000-Ada", "rtx-6000-ada": "RTX6000-Ada",
}  # fmt: skip


def _accelerator(gpu: str) -> str:
    """A card of the catalogue by SkyPilot's name. Raises RecipeError for `auto`: a card that is to be rented must be named."""
    if gpu == AUTO:
        raise RecipeError("gpu is auto, and SkyPilot must know which card to rent", "Name it, for example gpu=rtx-4090.")
    return _SKYPILOT_NAMES.get(gpu.lower(), gpu.upper().replace("-", ""))


ENGINES: dict[str, Callable[[Job], str]] = {"slurm": slurm, "kubernetes": kubernetes, "skypilot": skypilot}


def job_file(engine: str, job: Job) -> str:
    """The text of the job file for one of ENGINES."""
    return ENGINES[engine](job)
