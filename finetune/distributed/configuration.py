"""Configuration files of accelerate and DeepSpeed for the `launch` section."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any

from finetune.card import nvidia
from finetune.card.visible import visible
from finetune.files import write_json
from finetune.planner.plan import Plan
from finetune.recipe.yaml import dump
from finetune.settings import Recipe, Settings
from finetune.system import WINDOWS

_PRECISION = {"bfloat16": "bf16", "float16": "fp16", "float32": "no"}


def is_distributed(settings: Recipe) -> bool:
    """Return whether the run needs a launcher."""
    return settings.launch.num_processes > 1 or settings.launch.strategy != "ddp"


def machine_problems(recipe: Recipe, *, on_cpu: bool) -> list[str]:
    """Return what this machine lacks for the `launch` section."""
    launch, problems = recipe.launch, []
    if launch.strategy == "deepspeed" and importlib.util.find_spec("deepspeed") is None:
        problems.append("launch.strategy deepspeed needs a package that is not installed: pip install deepspeed")
    if WINDOWS and is_distributed(recipe):
        problems.append("launch: several processes, FSDP and DeepSpeed need NCCL, which Windows lacks; run it in WSL2")
    local_processes = launch.processes_here
    if not on_cpu and local_processes > 1:
        cards = len(visible(nvidia.read_devices()[0]))
        if cards < local_processes:
            problems.append(f"launch.num_processes needs {local_processes} GPUs on this machine; {cards} can be used")
    return problems


def write_configuration(run: Path, plan: Plan) -> Path:
    """Write the files in RUN/launch; return the path of `accelerate.yaml`."""
    folder = run.absolute() / "launch"
    folder.mkdir(exist_ok=True)
    deepspeed = folder / "deepspeed.json"
    if plan.settings.launch.strategy == "deepspeed":
        write_json(deepspeed, deepspeed_configuration(plan.settings))
    path = folder / "accelerate.yaml"
    path.write_text(dump(accelerate_configuration(plan.settings, deepspeed)), encoding="utf-8")
    return path


def accelerate_configuration(settings: Settings, deepspeed: Path) -> dict[str, Any]:
    """Return accelerate's configuration."""
    launch = settings.launch
    kind = {"ddp": "MULTI_GPU", "fsdp": "FSDP", "deepspeed": "DEEPSPEED"}[launch.strategy]
    values: dict[str, Any] = {
        "compute_environment": "LOCAL_MACHINE", "distributed_type": kind, "use_cpu": False, "debug": False,
        "num_processes": launch.num_processes, "num_machines": launch.num_machines, "machine_rank": launch.machine_rank,
        "main_process_ip": launch.main_process_ip, "rdzv_backend": "static",
        # on one machine 0 lets accelerate find a free port
        "main_process_port": launch.main_process_port if launch.num_machines > 1 else 0,
    }  # fmt: skip
    if launch.strategy != "deepspeed":  # DeepSpeed's own file sets the precision
        values["mixed_precision"] = _PRECISION[settings.dtype]
    if launch.strategy == "fsdp":
        # the model does gradient checkpointing, not FSDP; every rank loads the weights: 4-bit weights can't be broadcast
        values["fsdp_config"] = {
            "fsdp_version": 2, "fsdp_auto_wrap_policy": "TRANSFORMER_BASED_WRAP", "fsdp_reshard_after_forward": True,
            "fsdp_offload_params": launch.offload == "cpu", "fsdp_state_dict_type": "FULL_STATE_DICT",
            "fsdp_cpu_ram_efficient_loading": False, "fsdp_activation_checkpointing": False,
        }  # fmt: skip
    if launch.strategy == "deepspeed":
        values["deepspeed_config"] = {
            "deepspeed_config_file": str(deepspeed), "zero3_init_flag": False, "deepspeed_multinode_launcher": "standard",
        }  # fmt: skip
    return values


def deepspeed_configuration(settings: Settings) -> dict[str, Any]:
    """Return DeepSpeed's configuration for ZeRO-2 or ZeRO-3."""
    launch = settings.launch
    micro, steps = settings.per_device_train_batch_size, settings.gradient_accumulation_steps
    # transformers fills in "auto"
    optimizer = {"lr": "auto", "betas": "auto", "eps": "auto", "weight_decay": "auto"}
    return {
        "train_batch_size": micro * steps * launch.num_processes, "train_micro_batch_size_per_gpu": micro,
        "gradient_accumulation_steps": steps, "gradient_clipping": settings.max_grad_norm,
        "bf16": {"enabled": settings.dtype == "bfloat16"}, "fp16": {"enabled": settings.dtype == "float16"},
        "optimizer": {"type": "AdamW", "params": optimizer},
        "zero_optimization": _zero(settings), "steps_per_print": 10**9, "wall_clock_breakdown": False,
    }  # fmt: skip


def _zero(settings: Settings) -> dict[str, Any]:
    launch = settings.launch
    nvme = {"nvme_path": launch.nvme_path} if launch.offload == "nvme" else {}
    offload = {"device": launch.offload, "pin_memory": True, **nvme}
    values: dict[str, Any] = {
        "stage": launch.zero_stage, "contiguous_gradients": True, "overlap_comm": True, "reduce_bucket_size": "auto",
    }  # fmt: skip
    # ZeRO-2 shards gradients and optimizer states, ZeRO-3 also weights
    if launch.zero_stage == 2:
        values |= {"allgather_bucket_size": 2 * 10**8, "reduce_scatter": True}
    else:
        values |= {
            "stage3_prefetch_bucket_size": "auto", "stage3_param_persistence_threshold": "auto",
            "stage3_gather_16bit_weights_on_model_save": True,
        }  # fmt: skip
    if launch.offload != "none":
        values["offload_optimizer"] = offload
        if launch.zero_stage == 3:
            values["offload_param"] = offload
    return values
