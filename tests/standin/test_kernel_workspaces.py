"""What torch allocates for each GPU is what the forecast says: for attention's backward pass, and while int8 weights load."""

import json
import shutil

import pytest

from finetune.bundled import model_path
from finetune.units import MIB

pytestmark = pytest.mark.standin

CODE = """
import sys
import torch
from finetune.memory.rules import _efficient_scratch, _flash_scratch

aten, capability = torch.ops.aten, torch.cuda.get_device_capability()


def allocations(function):
    torch.cuda.memory._record_memory_history(stacks="python", context=None)
    function()
    events = torch.cuda.memory._snapshot()["device_traces"][0]
    torch.cuda.memory._record_memory_history(enabled=None)
    return [event["size"] for event in events if event["action"] == "alloc"]


def efficient(query, key, value, grad):
    out, *saved = aten._scaled_dot_product_efficient_attention(query, key, value, None, True, 0.0, True)
    wanted = [True, True, True, False]
    backward = aten._scaled_dot_product_efficient_attention_backward
    return allocations(lambda: backward(grad, query, key, value, None, out, *saved, 0.0, wanted, True)), _efficient_scratch(
        query, key, capability
    )


def flash(query, key, value, grad):
    out, logsumexp, *saved, seed, offset, _ = aten._scaled_dot_product_flash_attention(query, key, value, 0.0, True, False)
    backward = aten._scaled_dot_product_flash_attention_backward
    saved = (logsumexp, *saved, 0.0, True, seed, offset)
    return allocations(lambda: backward(grad, query, key, value, out, *saved)), _flash_scratch(query, key)


for dtype in (torch.float16, torch.bfloat16, torch.float32):
    half, modern = dtype != torch.float32, capability >= (8, 0)
    for kernel in (efficient, flash) if half and modern else (efficient,):
        for dim in (64, 80, 96, 128, 192, 256) if dtype != torch.bfloat16 or modern else ():
            for batch, heads, tokens in ((1, 12, 905), (2, 12, 905), (1, 32, 2048), (1, 4, 300)):
                tensors = [torch.empty(batch, heads, tokens, dim, dtype=dtype, device="cuda") for _ in range(4)]
                sizes, rule = kernel(*tensors)
                if not all(size in sizes for size in rule) or max(sizes) > max(*rule, tensors[0].nbytes):
                    print(kernel.__name__, dtype, dim, (batch, heads, tokens), sorted(sizes), rule)
"""


@pytest.mark.parametrize("gpu", ["t4", "rtx-5090", pytest.param("a100-80gb", marks=pytest.mark.exhaustive)])
def test_attentions_backward_takes_what_the_rules_say(standin, gpu):
    assert standin(gpu).python(CODE).stdout == ""


#: With expandable segments a pool grows by pages of 20 MiB; loading has one pool of small blocks and one of large ones.
PAGE = 20 * MIB
LOAD = """
import json, sys
import torch
from transformers import AutoConfig, AutoModelForCausalLM
from finetune.card import find_card
from finetune.model.adapters import attach_adapters
from finetune.model.build import build_base
from finetune.model.transformers_config import load_config
from finetune.planner.planning import plan_recipe, without_rows
from finetune.recipe import load_recipe

folder = sys.argv[1]
fixed = [f"model_name_or_path={folder}", "gpu=auto", "load_in_4bit=false", "load_in_8bit=true", "optim=adamw_torch_fused"]
for shape in json.loads(sys.argv[2]):
    config = AutoConfig.from_pretrained(folder)
    config.update({**shape, "num_hidden_layers": 2})
    AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).save_pretrained(folder)
    recipe = load_recipe("tiny-cpu", [*fixed, "activation_checkpointing=true", "activation_checkpointing_every_n_layers=1"])
    plan = plan_recipe(recipe, find_card("auto"), without_rows)
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    base = build_base(plan.settings, load_config(plan.settings), device=0, weights=True)
    model = attach_adapters(base, plan.settings)
    measured = torch.cuda.max_memory_allocated() - before, torch.cuda.max_memory_reserved()
    print("sizes", plan.forecast.peaks["load"], plan.forecast.reserved_peaks["load"], *measured)
    del base, model
"""
WIDE = {"hidden_size": 512, "intermediate_size": 8192, "num_attention_heads": 8, "num_key_value_heads": 4, "head_dim": 64}
SQUARE = {"hidden_size": 1536, "intermediate_size": 1536, "num_attention_heads": 12, "num_key_value_heads": 12, "head_dim": 128}


def test_the_load_peak_of_int8_weights_is_the_forecasts(standin, tmp_path):
    folder = shutil.copytree(model_path("tiny"), tmp_path / "model")
    machine = standin("rtx-4090")
    machine.environment["PYTORCH_ALLOC_CONF"] = "expandable_segments:True"
    output = machine.python(LOAD, str(folder), json.dumps([WIDE, SQUARE]), program="warm python").stdout
    sizes = [[int(size) for size in line.split()[1:]] for line in output.splitlines() if line.startswith("sizes")]
    assert len(sizes) == 2
    for allocated, reserved, measured_allocated, measured_reserved in sizes:
        assert measured_allocated == pytest.approx(allocated, rel=0.001)
        assert abs(measured_reserved - reserved) <= 2 * PAGE
