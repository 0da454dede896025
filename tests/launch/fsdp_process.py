"""One of two processes that split a 4-bit model with FSDP2: `torchrun fsdp_process.py STRATEGY OUT`. Not a test.

accelerate starts FSDP on cards only, so its preparation of the model is called here with the plugin that the run would have.
"""

import json
import sys
from pathlib import Path
from types import SimpleNamespace

import torch
import torch.distributed as dist
from accelerate import FullyShardedDataParallelPlugin
from accelerate.utils.fsdp_utils import fsdp2_prepare_model
from torch.distributed.tensor import DTensor

from finetune.model.build import attach_adapters, build_base, load_config, prepare_for_training
from finetune.recipe import load_recipe, resolved

strategy, out = sys.argv[1], Path(sys.argv[2])
dist.init_process_group("gloo")
recipe = load_recipe("tiny-cpu", ["per_device_train_batch_size=1", "launch.num_processes=2", f"launch.strategy={strategy}"])
settings = resolved(recipe, attn_implementation="sdpa", load_in_8bit=False, dtype="bfloat16")
torch.manual_seed(0)
model = attach_adapters(build_base(settings, load_config(settings), device="cpu", weights=True), settings)
prepare_for_training(model, settings)
rows = torch.randint(5, 600, (2, 64), generator=torch.Generator().manual_seed(1))
whole = model(input_ids=rows, labels=rows).loss.item()
plugin = FullyShardedDataParallelPlugin(
    fsdp_version=2, reshard_after_forward=True, auto_wrap_policy="transformer_based_wrap", cpu_ram_efficient_loading=False
)
accelerator = SimpleNamespace(
    state=SimpleNamespace(fsdp_plugin=plugin), is_main_process=dist.get_rank() == 0, mixed_precision="no",
    device=torch.device("cpu"), torch_device_mesh=None,
)  # fmt: skip
split = fsdp2_prepare_model(accelerator, model)
loss = split(input_ids=rows, labels=rows).loss
loss.backward()
parameters = list(split.parameters())
norm = sum(float(parameter.grad.full_tensor().square().sum()) for parameter in parameters if parameter.requires_grad) ** 0.5
values = {
    "whole_loss": whole, "split_loss": loss.item(), "gradient_norm": norm, "parameters": len(parameters),
    "split_parameters": sum(isinstance(parameter, DTensor) for parameter in parameters),
}  # fmt: skip
(out / f"{dist.get_rank()}.json").write_text(json.dumps(values))
dist.destroy_process_group()
