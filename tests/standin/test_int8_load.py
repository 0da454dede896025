"""Loading into int8 takes what the forecast says: torch's allocator on one side, the dry run and its replay on the other."""

import json
import shutil

import pytest

from finetune.bundled import model_path
from finetune.units import MIB

pytestmark = pytest.mark.standin

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
