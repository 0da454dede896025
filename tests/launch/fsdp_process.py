"""One of two ranks that shard a 4-bit model with FSDP2: `torchrun fsdp_process.py STRATEGY OUT`. Not a test.

accelerate starts FSDP only on GPUs, so its preparation of the model is called here with the plugin that the run would have,
after the Trainer's own change to it.
"""

import json
import sys
from pathlib import Path
from types import SimpleNamespace

import torch
import torch.distributed as dist
from accelerate import FullyShardedDataParallelPlugin
from accelerate.utils.fsdp_utils import fsdp2_prepare_model
from torch.distributed.fsdp import FSDPModule
from torch.distributed.fsdp._fully_shard import _fsdp_param_group
from torch.distributed.tensor import DTensor
from transformers import trainer

from finetune.compat.transformers import keep_fsdp_wrap_policy
from finetune.layers.checkpointing import decoder_layers
from finetune.model.adapters import attach_adapters, prepare_for_training
from finetune.model.build import build_base
from finetune.model.transformers_config import load_config
from finetune.recipe import load_recipe
from finetune.settings import resolved

strategy, out = sys.argv[1], Path(sys.argv[2])
dist.init_process_group("gloo")
recipe = load_recipe(
    "tiny-cpu", ["gpu=auto", "per_device_train_batch_size=1", "launch.num_processes=2", f"launch.strategy={strategy}"]
)
settings = resolved(recipe, attn_implementation="sdpa", load_in_8bit=False, dtype="bfloat16")
torch.manual_seed(0)
model = attach_adapters(build_base(settings, load_config(settings), device="cpu", weights=True), settings)
prepare_for_training(model, settings)
rows = torch.randint(5, 600, (2, 64), generator=torch.Generator().manual_seed(1))
full_loss = model(input_ids=rows, labels=rows).loss.item()
plugin = FullyShardedDataParallelPlugin(
    fsdp_version=2, reshard_after_forward=True, auto_wrap_policy="transformer_based_wrap", cpu_ram_efficient_loading=False
)
accelerator = SimpleNamespace(
    state=SimpleNamespace(fsdp_plugin=plugin), is_main_process=dist.get_rank() == 0, mixed_precision="no",
    device=torch.device("cpu"), torch_device_mesh=None,
)  # fmt: skip
keep_fsdp_wrap_policy()
trainer.update_fsdp_plugin_peft(model, accelerator)
plugin.mixed_precision_policy = None  # it rounds the loss to bf16; the sharding is compared here
sharded = fsdp2_prepare_model(accelerator, model)
states = [module._get_fsdp_state() for module in sharded.modules() if isinstance(module, FSDPModule)]
groups = list({id(group): group for state in states for group in state._fsdp_param_groups}.values())
gathered_bytes = []  # of all-gathered parameters and their buffers, after each step of an all-gather


def recording(function):
    def record(*arguments):
        result = function(*arguments)
        outputs = [tensor for group in groups for param in group.fsdp_params for tensor in param.all_gather_outputs]
        state = groups[0].comm_ctx.all_gather_state
        results = [result, *(group._all_gather_result for group in groups), state.all_gather_result if state else None]
        buffers = {id(gathered.all_gather_output): gathered.all_gather_output for gathered in results if gathered is not None}
        sizes = [tensor.untyped_storage().nbytes() for tensor in (*outputs, *buffers.values())]
        gathered_bytes.append(sum(sizes))
        return result

    return record


for name in ("foreach_all_gather", "foreach_all_gather_copy_out"):
    setattr(_fsdp_param_group, name, recording(getattr(_fsdp_param_group, name)))
loss = sharded(input_ids=rows, labels=rows).loss
loss.backward()
parameters = list(sharded.parameters())
norm = sum(float(parameter.grad.full_tensor().square().sum()) for parameter in parameters if parameter.requires_grad) ** 0.5
values = {
    "full_loss": full_loss, "sharded_loss": loss.item(), "gradient_norm": norm, "parameters": len(parameters),
    "sharded_parameters": sum(isinstance(parameter, DTensor) for parameter in parameters),
    "sharded_layers": sum(isinstance(layer, FSDPModule) for layer in decoder_layers(sharded)),
    "local_bytes": sum(p.to_local().untyped_storage().nbytes() for p in parameters if isinstance(p, DTensor)),
    "trained_bytes": sum(p.to_local().untyped_storage().nbytes() for p in parameters if p.requires_grad),
    "gathered_bytes": max(gathered_bytes),
}  # fmt: skip
(out / f"{dist.get_rank()}.json").write_text(json.dumps(values))
dist.destroy_process_group()
