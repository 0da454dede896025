"""Only the worker opens a CUDA context: what a process that plans would hold is missing to the run that it plans."""

import json

import pytest

pytestmark = pytest.mark.standin

PAGE = """
import sys
from pathlib import Path
from app.worker import Worker

folder = Path(sys.argv[1])
planner = Worker(folder, ".planning", log=folder / "log.txt")
assert planner.call("plan", recipe="model_name_or_path: tiny\\ndataset: support\\ngpu: auto\\nlora_r: 16\\n")
planner.close()
"""


FORK = """
import os
from finetune.card.visible import hide_gpus
hide_gpus()
import torch
from transformers import LlamaConfig
from finetune.model.padding import needs_padding_mask

def backward():
    torch.ones(1, requires_grad=True).sum().backward()

small = LlamaConfig(hidden_size=16, intermediate_size=16, num_hidden_layers=1, num_attention_heads=2, vocab_size=16)
assert not needs_padding_mask(small)
backward()
if not (child := os.fork()):
    backward()
    os._exit(0)
assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
"""


@pytest.fixture
def no_context(standin):
    """A machine where a process that opens a context is killed."""
    machine = standin("rtx-4090")
    machine.environment["STAND_IN_ABORT_ON_CONTEXT"] = "1"
    return machine


@pytest.mark.parametrize("command", [["plan", "tiny-cpu", "gpu=auto", "--json"], ["data", "tiny-cpu"], ["recipes"]])
def test_commands_that_plan_open_none(no_context, command):
    no_context.run("cold finetune", *command)


def test_the_doctor_leaves_the_context_to_its_probe(no_context):
    report = json.loads(no_context.run("cold finetune", "doctor", "--json", check=False).stdout)
    assert any("SIGABRT" in finding["what"] for finding in report["findings"])


def test_the_page_plans_without_one(no_context, tmp_path):
    no_context.environment["FINETUNE_CACHE"] = str(tmp_path / "cache")
    no_context.python(PAGE, str(tmp_path))


def test_a_forecast_of_padded_rows_leaves_autograd_able_to_fork(no_context):
    no_context.python(FORK)
