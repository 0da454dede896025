"""A day's use, as typed: plan, run, out of memory beside a neighbour, retry, stop, resume, eval, chat, merge.

No kernel runs, so nothing here is about losses or answers.
"""

import json
import time
from pathlib import Path

import pytest

pytestmark = [pytest.mark.standin, pytest.mark.slow]

#: Another program: takes all memory but so many bytes, and holds it until its input ends.
NEIGHBOUR = """
import torch
torch.cuda.init()
print("ready", flush=True)
left = int(input())
held = torch.empty(torch.cuda.mem_get_info()[0] - left, dtype=torch.uint8, device="cuda")
print("taken", flush=True)
input()
"""
PAGE = 20 << 20  # of an expandable segment
RECIPE = """
model_name_or_path: {model}
dataset: {{path: {rows}, test_split_size: 4}}
load_in_4bit: true
effective_batch_size: 16
max_steps: 30
eval_steps: 5
save_steps: 5
sample_answers: 0
gpu: auto
output_dir: {run}
"""


def events(run, kind):
    path = run / "events.jsonl"
    lines = path.read_text().splitlines() if path.exists() else []
    return [event for event in map(json.loads, lines) if event["kind"] == kind]


def wait_for(run, kind, count=1):
    """The events of a kind, when there are so many; the test's time limit ends this."""
    while len(events(run, kind)) < count:
        time.sleep(0.02)
    return events(run, kind)


def tensor_shapes(path):
    with path.open("rb") as file:
        header = json.loads(file.read(int.from_bytes(file.read(8), "little")))
    return {name: (tensor["dtype"], tensor["shape"]) for name, tensor in header.items() if name != "__metadata__"}


@pytest.fixture
def machine(standin, six_layers, tmp_path):
    """A stand-in RTX 4090 with caches of its own, and a recipe for a model of six layers."""
    machine = standin("rtx-4090")
    machine.environment |= {"FINETUNE_CACHE": str(tmp_path / "cache"), "HF_HOME": str(tmp_path / "hub"), "HF_HUB_OFFLINE": "1"}
    recipe = RECIPE.format(model=tmp_path / "model", rows=tmp_path / "rows.jsonl", run=tmp_path / "run")
    (tmp_path / "recipe.yaml").write_text(recipe)
    return machine


def check_forecasts(run, enough):
    """Peaks of the events beside the forecasts of the plan that trained in the end."""
    (first,) = (check for check in events(run, "forecast") if check["at"] == "first steps")
    assert first["predicted_allocated_bytes"] == enough["peaks"]["train"]
    assert first["measured_allocated_bytes"] == pytest.approx(enough["peaks"]["train"], rel=0.002)
    measured = {event["phase"]: event["peak_allocated_bytes"] for event in events(run, "phase")}
    assert measured["load"] == pytest.approx(enough["peaks"]["load"], rel=0.001)
    assert measured["save"] == pytest.approx(enough["peaks"]["save"], rel=0.01)
    steps = events(run, "step")
    assert max(step["peak_reserved_bytes"] for step in steps) <= enough["reserved_peaks"]["train"] + 2 * PAGE


def test_a_days_use(machine, tmp_path):
    recipe, run = tmp_path / "recipe.yaml", tmp_path / "run"
    planned, enough = (
        json.loads(machine.run("finetune", "plan", recipe, *more, "--json").stdout)["forecast"]
        for more in ([], ["per_device_train_batch_size=4"])
    )

    neighbour = machine.start("python", "-c", NEIGHBOUR)
    assert neighbour.stdout.readline() == "ready\n"
    training = machine.start("finetune", "run", recipe)
    wait_for(run, "phase")  # loaded: the neighbour leaves too little for the plan's steps, and enough for smaller ones
    steps = [forecast["reserved_peaks"]["train"] for forecast in (planned, enough)]
    neighbour.stdin.write(f"{sum(steps) // 2 - planned['reserved_peaks']['load']}\n")
    neighbour.stdin.flush()
    assert neighbour.stdout.readline() == "taken\n"
    wait_for(run, "checkpoint")
    machine.run("finetune", "pause", run)
    output, _ = training.communicate()
    assert training.returncode == 143, output
    neighbour.communicate("\n")
    (failure,), (retry,) = events(run, "out_of_memory"), events(run, "retry")
    assert failure["forecast_allocated_bytes"] == planned["peaks"]["train"] and failure["micro_batch"] == 8
    assert retry["changes"] == {"per_device_train_batch_size": 4, "gradient_accumulation_steps": 4}
    assert "out of memory" in output and "retrying with per_device_train_batch_size=4" in output and "finetune resume" in output
    others = {step["other_processes_bytes"] for step in events(run, "step")}
    assert len(others) == 1 and others.pop() > planned["peak_high_bytes"]
    check_forecasts(run, enough)

    stopped_at = events(run, "checkpoint")[-1]["step"]
    machine.run("finetune", "resume", run)
    assert events(run, "start")[-1]["resumed_from"] == f"checkpoint-{stopped_at}"
    assert [step["step"] for step in events(run, "step")] == list(range(1, 31))
    assert events(run, "state")[-1]["state"] == "finished"

    scores = json.loads(machine.run("finetune", "eval", run, "--rows", "2", "--json").stdout)
    assert scores["rows"] == 2 and len(scores["tuned"]["answers"]) == 2
    answer = machine.run("finetune", "chat", run, "--max-new-tokens", "4", "--json", input="hello\n").stdout
    assert json.loads(answer)["prompt"] == "hello" and json.loads(answer)["tokens"] == 4

    merged = Path(json.loads(machine.run("finetune", "merge", run, "--json").stdout)["merged"])
    shapes = [tensor_shapes(folder / "model.safetensors") for folder in (merged, tmp_path / "model")]
    assert shapes[0] == shapes[1] and (merged / "config.json").is_file() and (merged / "tokenizer.json").is_file()
