"""One of two ranks that read their own rows of a 4-bit model: `torchrun own_rows_process.py MODEL OUT`. Not a test.

accelerate starts FSDP only on GPUs: its preparation shards the model, which has no weights yet. Compared with a full one.
"""

import gc
import json
import sys
import threading
from pathlib import Path
from types import SimpleNamespace

import torch
import torch.distributed as dist
from accelerate import FullyShardedDataParallelPlugin, accelerator
from torch.distributed.tensor import DTensor
from transformers import trainer

from finetune.compat.accelerate import keep_fsdp_wrap_policy
from finetune.model.adapters import attach_adapters, prepare_for_training
from finetune.model.build import build_base, load_base
from finetune.model.techniques import apply_techniques
from finetune.model.transformers_config import load_config
from finetune.recipe import load_recipe
from finetune.settings import resolved


class PeakMemory:
    """Peak of this process's anonymous memory above that at the start, in bytes; mapped files are the page cache's."""

    def __enter__(self):
        gc.collect()
        self.base = self.peak = self.anonymous_bytes()
        self.stopped = threading.Event()
        self.thread = threading.Thread(target=self.watch)
        self.thread.start()
        return self

    def __exit__(self, *_):
        self.stopped.set()
        self.thread.join()
        self.bytes = max(self.peak, self.anonymous_bytes()) - self.base

    def watch(self):
        while not self.stopped.wait(0.005):
            self.peak = max(self.peak, self.anonymous_bytes())

    @staticmethod
    def anonymous_bytes():
        lines = Path("/proc/self/status").read_text().splitlines()
        return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("RssAnon"))


def settings_for(model):
    launch = ["gpu=auto", "per_device_train_batch_size=1", "launch.num_processes=2", "launch.strategy=fsdp"]
    # small adapters: the memory is that of the weights
    recipe = load_recipe("tiny-cpu", [*launch, f"model_name_or_path={model}", "lora_r=1"])
    return resolved(
        recipe, attn_implementation="sdpa", load_in_8bit=False, dtype="bfloat16", activation_checkpointing=True,
        activation_checkpointing_every_n_layers=1, layer_offloading=False, lean_layers=False, torch_compile=False,
    )  # fmt: skip


def with_adapters(base):
    """A base with adapters, as the worker builds it; B is not zero, so that A changes the loss, too."""
    torch.manual_seed(0)
    model = attach_adapters(base, settings)
    apply_techniques(model, settings)
    prepare_for_training(model, settings)
    generator = torch.Generator().manual_seed(7)
    for name, parameter in model.named_parameters():
        if "lora_B" in name:
            parameter.data.copy_(0.05 * torch.randn(parameter.shape, generator=generator))
    return model


def sharded(model):
    plugin = FullyShardedDataParallelPlugin(
        fsdp_version=2, reshard_after_forward=True, auto_wrap_policy="transformer_based_wrap", cpu_ram_efficient_loading=False
    )
    state = SimpleNamespace(fsdp_plugin=plugin)
    run_accelerator = SimpleNamespace(
        state=state, is_main_process=dist.get_rank() == 0, mixed_precision="no", device=torch.device("cpu"),
        torch_device_mesh=None,
    )  # fmt: skip
    keep_fsdp_wrap_policy()
    trainer.update_fsdp_plugin_peft(model, run_accelerator)
    plugin.mixed_precision_policy = None
    return accelerator.fsdp2_prepare_model(run_accelerator, model)


def loss_and_norm(model):
    rows = torch.randint(5, 500, (1, 32), generator=torch.Generator().manual_seed(1))
    loss = model(input_ids=rows, labels=rows, use_cache=False).loss
    loss.backward()
    gradients = [parameter.grad for parameter in model.parameters() if parameter.requires_grad]
    full_gradients = [gradient.full_tensor() if isinstance(gradient, DTensor) else gradient for gradient in gradients]
    return loss.item(), sum(float(gradient.double().square().sum()) for gradient in full_gradients) ** 0.5


dist.init_process_group("gloo")
settings = settings_for("tiny")
with_adapters(build_base(settings, load_config(settings), device="cpu", weights=True))  # imports and pools
settings = settings_for(sys.argv[1])
with PeakMemory() as peak:
    model = sharded(with_adapters(load_base(settings, load_config(settings), "cpu", dist.get_rank())))
parameters = list(model.parameters())
loss, norm = loss_and_norm(model)
values = {
    "loss": loss, "norm": norm, "peak_bytes": peak.bytes,
    "parameters": len(parameters), "sharded_parameters": sum(isinstance(parameter, DTensor) for parameter in parameters),
}  # fmt: skip
whole = with_adapters(build_base(settings, load_config(settings), device="cpu", weights=True))
values["full_loss"], values["full_norm"] = loss_and_norm(whole)
values["model_bytes"] = sum(parameter.nbytes for parameter in whole.parameters() if not parameter.requires_grad)
(Path(sys.argv[2]) / f"{dist.get_rank()}.json").write_text(json.dumps(values))
dist.destroy_process_group()
