"""Job files are valid, start the recipe's run, and contain no secret."""

import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from finetune.jobs import ENGINES, Job, job_file
from finetune.recipe import parse_recipe, recipe_from


def job(**launch):
    values = {
        "model_name_or_path": "Qwen/Qwen3-8B",
        "dataset": {"path": "data/rows.jsonl"},
        "gpu": "rtx-4090",
        "launch": launch,
    }
    return Job(recipe_from(values), name="My_Recipe v2")


TWO_MACHINES = {"num_processes": 8, "num_machines": 2, "strategy": "fsdp"}


def documents(engine, spec):
    return list(yaml.safe_load_all(job_file(engine, spec)))


def check_bash_syntax(script):
    process = subprocess.run(["bash", "-n"], input=script, text=True, capture_output=True)
    assert process.returncode == 0, process.stderr


@pytest.mark.parametrize("launch", [{}, {"num_processes": 2}, TWO_MACHINES])
def test_the_slurm_script_is_bash_with_directives_before_the_first_command(launch):
    script = job_file("slurm", job(**launch))
    check_bash_syntax(script)
    lines = script.splitlines()
    first_command = next(number for number, line in enumerate(lines) if line and not line.startswith("#"))
    assert lines[0].startswith("#!") and not any(line.startswith("#SBATCH") for line in lines[first_command:])
    assert f"#SBATCH --nodes={launch.get('num_machines', 1)}" in lines
    assert f"#SBATCH --gpus-per-node={launch.get('num_processes', 1) // launch.get('num_machines', 1)}" in lines


@pytest.fixture
def fake_slurm(tmp_path):
    """A PATH where srun runs its command, and finetune records its arguments and exits with FINETUNE_STATUS."""
    scripts = {
        "srun": 'exec "$@"',
        "scontrol": 'if [ "$1" = show ]; then printf "node1\\nnode2\\n"; else echo "$@" >> requeued; fi',
        "finetune": 'printf "%s\\n" "$@" > arguments; exit "${FINETUNE_STATUS:-0}"',
    }
    for name, body in scripts.items():
        path = tmp_path / "bin" / name
        path.parent.mkdir(exist_ok=True)
        path.write_text(f"#!/bin/sh\n{body}\n")
        path.chmod(0o755)
    return {"PATH": f"{tmp_path / 'bin'}:/usr/bin:/bin"}


def run_slurm(folder, environment, **variables):
    slurm = {"SLURM_JOB_ID": "77", "SLURM_NODEID": "1", "SLURM_JOB_NODELIST": "node[1-2]"}
    script = job_file("slurm", job(**TWO_MACHINES))
    return subprocess.run(
        ["bash", "-c", script], cwd=folder, env={**environment, **slurm, **variables}, capture_output=True, text=True
    )


def test_the_slurm_script_gives_each_machine_its_number_and_the_address_of_the_first(fake_slurm, tmp_path):
    assert run_slurm(tmp_path, fake_slurm).returncode == 0
    arguments = (tmp_path / "arguments").read_text().splitlines()
    assert arguments[:2] == ["run", "recipe-77.yaml"]
    assert {"launch.machine_rank=1", "launch.main_process_ip=node1", "gpu=auto"} <= set(arguments)
    assert "output_dir=runs/77-finetune-my-recipe-v2-machine-1" in arguments
    recipe = parse_recipe((tmp_path / "recipe-77.yaml").read_text())
    assert recipe.launch.num_processes == 8 and recipe.launch.strategy == "fsdp"


def test_a_slurm_job_that_is_stopped_is_queued_again_and_continues(fake_slurm, tmp_path):
    assert run_slurm(tmp_path, fake_slurm, FINETUNE_STATUS="143").returncode == 143
    assert (tmp_path / "requeued").read_text() == "requeue 77\n"
    (tmp_path / "runs" / "77-finetune-my-recipe-v2-machine-1").mkdir(parents=True)
    run_slurm(tmp_path, fake_slurm)
    assert (tmp_path / "arguments").read_text().splitlines()[0] == "resume"


def test_a_slurm_job_that_fails_is_not_queued_again(fake_slurm, tmp_path):
    assert run_slurm(tmp_path, fake_slurm, FINETUNE_STATUS="5").returncode == 5
    assert not (tmp_path / "requeued").exists()


def test_kubernetes_machines_find_each_other_by_name(tmp_path):
    config, service, batch = documents("kubernetes", job(**TWO_MACHINES))
    names = {document["metadata"]["name"] for document in (config, service, batch)}
    assert names == {"finetune-my-recipe-v2"}
    assert parse_recipe(config["data"]["recipe.yaml"]).launch.num_machines == 2
    spec = batch["spec"]
    assert (spec["completions"], spec["parallelism"], spec["completionMode"]) == (2, 2, "Indexed")
    pod = spec["template"]["spec"]
    assert pod["subdomain"] == service["metadata"]["name"] and service["spec"]["clusterIP"] == "None"
    assert service["spec"]["selector"] == spec["template"]["metadata"]["labels"]
    container = pod["containers"][0]
    assert container["resources"]["limits"] == {"nvidia.com/gpu": 4}
    script = container["command"][-1]
    check_bash_syntax(script)
    assert 'launch.main_process_ip="finetune-my-recipe-v2-0.finetune-my-recipe-v2"' in script
    assert pod["securityContext"]["runAsNonRoot"] and pod["terminationGracePeriodSeconds"] >= 120


def test_a_skypilot_task_names_gpus_as_skypilot_does():
    (task,) = documents("skypilot", job(**TWO_MACHINES))
    assert task["num_nodes"] == 2 and task["resources"]["accelerators"] == "RTX4090:4"
    for key in ("setup", "run"):
        check_bash_syntax(task[key])
    assert 'launch.machine_rank="$SKYPILOT_NODE_RANK"' in task["run"]


@pytest.mark.parametrize("engine", sorted(ENGINES))
def test_one_process_needs_no_address(engine):
    text = job_file(engine, job())
    assert "machine_rank" not in text and "main_process_ip" not in text
    assert "gpu=auto" in text


def test_what_an_engine_can_not_do_is_reported(tmp_path):
    command = [sys.executable, "-m", "finetune", "export-launch"]
    skypilot = subprocess.run([*command, "skypilot", "tiny-cpu", "gpu=auto"], capture_output=True, text=True)
    assert skypilot.returncode == 2 and "which GPU to rent" in skypilot.stderr
    unknown_engine = subprocess.run([*command, "pbs", "tiny-cpu"], capture_output=True, text=True)
    assert unknown_engine.returncode == 2 and "slurm" in unknown_engine.stderr
    uneven_batch = ["slurm", "tiny-cpu", "per_device_train_batch_size=1", "effective_batch_size=9", "launch.num_processes=3"]
    two_machines = subprocess.run([*command, *uneven_batch, "launch.num_machines=2"], capture_output=True, text=True)
    assert two_machines.returncode == 2 and "not divisible" in two_machines.stderr


def test_the_command_writes_a_file_and_never_overwrites_one(tmp_path):
    path = tmp_path / "job.sbatch"
    command = [sys.executable, "-m", "finetune", "export-launch", "slurm", "tiny-cpu", "-o", str(path)]
    assert subprocess.run(command, capture_output=True).returncode == 0
    check_bash_syntax(path.read_text())
    assert "--gpus-per-node" not in path.read_text()  # tiny-cpu runs on CPUs
    second = subprocess.run(command, capture_output=True, text=True)
    assert second.returncode == 2 and "exists already" in second.stderr
    assert Path(path).is_file()
