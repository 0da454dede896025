"""Several ranks: helpers (no-ops at world size 1), configuration of accelerate and DeepSpeed, the supervisor's launcher."""

from __future__ import annotations

import contextlib
import ctypes
import importlib.util
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil

from finetune import errors
from finetune.card.visible import usable_devices
from finetune.errors import FAILED
from finetune.events import Event, EventWriter, OutOfMemory, State, event_from, event_json
from finetune.files import read_object, write_json
from finetune.planner.plan import Plan
from finetune.recipe.yaml import dump
from finetune.settings import Recipe, Settings
from finetune.system import WINDOWS

#: Exit statuses that all ranks reach at the same step: a barrier before the exit is safe.
COMMON_EXITS = (errors.FINISHED, errors.Diverged.exit_code, *errors.STOPPED)
_PR_SET_PDEATHSIG = 1


@dataclass(frozen=True)
class Rank:
    """Rank, local rank and world size; rank 0 of 1 without a launcher."""

    number: int = 0
    local_rank: int = 0
    world_size: int = 1

    @property
    def is_local_rank_0(self) -> bool:
        # local rank 0 writes its machine's run directory: events, checkpoints, adapter
        return self.local_rank == 0


def this_rank() -> Rank:
    """Return this process's rank."""
    if "TORCHELASTIC_RUN_ID" not in os.environ:
        return Rank()
    return Rank(*(int(os.environ[name]) for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE")))


def ending_path(run: Path, local_rank: int) -> Path:
    """Return the file of a local rank's final event."""
    return run / "launch" / f"ending-{local_rank}.json"


class RankEvents(EventWriter):
    """Event writer of a rank; a final event goes to a file that the supervisor reads."""

    def __init__(self, events: Path, rank: Rank) -> None:
        super().__init__(events)
        self._rank, self._ending = rank, ending_path(events.parent, rank.local_rank)

    def emit(self, event: Event) -> None:
        code = errors.OutOfMemory.exit_code if isinstance(event, OutOfMemory) else None
        if isinstance(event, State):
            code = event.exit_code
        # the supervisor reports one failure for all ranks
        if code is not None:
            self._ending.parent.mkdir(exist_ok=True)
            write_json(self._ending, {"rank": self._rank.number, "exit_code": code, "event": event_json(event)})
        if self._rank.is_local_rank_0 and (code is None or code in COMMON_EXITS):
            super().emit(event)


def end_with_launcher(rank: Rank) -> None:
    """Let Linux send SIGTERM to this process when its launcher dies."""
    if rank.world_size > 1 and sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)


def tear_down(rank: Rank, code: int) -> int:
    """Return the exit status: 0 after a barrier for common exits, 1 for failures."""
    if rank.world_size == 1:
        return code
    if code not in COMMON_EXITS:
        return 1
    import torch.distributed as dist

    if dist.is_initialized():
        dist.barrier()
        dist.destroy_process_group()
    return 0


def barrier() -> None:
    """Wait for all ranks."""
    import torch.distributed as dist

    if dist.is_initialized():
        dist.barrier()


def all_reduce_max(number: int) -> int:
    """Return the maximum over all ranks."""
    return int(all_reduce([number], "MAX")[0])


def all_reduce_min(number: int) -> int:
    """Return the minimum over all ranks."""
    return -all_reduce_max(-number)


def all_reduce(numbers: list[float], operation: str) -> list[float]:
    """Reduce each number over all ranks. `operation`: SUM, MAX, ..."""
    import torch
    import torch.distributed as dist

    if not dist.is_initialized():
        return numbers
    device = "cuda" if "nccl" in dist.get_backend() else "cpu"
    values = torch.tensor(numbers, dtype=torch.float64, device=device)  # exact for integers below 2^53
    dist.all_reduce(values, getattr(dist.ReduceOp, operation))
    return values.tolist()


SHUTDOWN_S = 15  # seconds between the failure of a rank and the kill of all ranks
_WORKER = "finetune.run.worker"


def is_distributed(settings: Recipe) -> bool:
    """Return whether the run needs a launcher."""
    return settings.launch.num_processes > 1 or settings.launch.strategy != "ddp"


def machine_problems(recipe: Recipe, *, on_cpu: bool) -> list[str]:
    """Return what this machine lacks for the `launch` section."""
    launch, problems = recipe.launch, []
    if launch.strategy == "deepspeed" and importlib.util.find_spec("deepspeed") is None:
        problems.append("launch.strategy deepspeed needs a package that is not installed: pip install deepspeed")
    if WINDOWS and is_distributed(recipe):
        problems.append("launch: several processes, FSDP and DeepSpeed need NCCL, which Windows lacks; use WSL2")
    local_processes = launch.processes_here
    if not on_cpu and local_processes > 1:
        cards = len(usable_devices())
        if cards < local_processes:
            problems.append(f"launch.num_processes needs {local_processes} GPUs on this machine; {cards} can be used")
    return problems


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
    if launch.strategy == "deepspeed":  # its own file sets the precision
        values["deepspeed_config"] = {
            "deepspeed_config_file": str(deepspeed), "zero3_init_flag": False, "deepspeed_multinode_launcher": "standard",
        }  # fmt: skip
    else:
        values["mixed_precision"] = {"bfloat16": "bf16", "float16": "fp16", "float32": "no"}[settings.dtype]
    if launch.strategy == "fsdp":
        # the model does gradient checkpointing, not FSDP; every rank loads the weights: 4-bit weights can't be broadcast
        values["fsdp_config"] = {
            "fsdp_version": 2, "fsdp_auto_wrap_policy": "TRANSFORMER_BASED_WRAP", "fsdp_reshard_after_forward": True,
            "fsdp_offload_params": launch.offload == "cpu", "fsdp_state_dict_type": "FULL_STATE_DICT",
            "fsdp_cpu_ram_efficient_loading": False, "fsdp_activation_checkpointing": False,
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
        "zero_optimization": _zero_configuration(settings), "steps_per_print": 10**9, "wall_clock_breakdown": False,
    }  # fmt: skip


def _zero_configuration(settings: Settings) -> dict[str, Any]:
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


class Launcher:
    """Runs a worker per rank through `accelerate launch` or torchrun."""

    def __init__(self, run: Path, log: Path, plan: Plan) -> None:
        self.run, self.log, self.plan = run, log, plan
        self.local_world_size = plan.settings.launch.processes_here

    def command(self) -> list[str]:
        """Return the command line of the launcher; write its configuration."""
        settings, folder = self.plan.settings, ending_path(self.run.absolute(), 0).parent
        folder.mkdir(exist_ok=True)
        # final events of an earlier attempt would count for this attempt
        for local_rank in range(self.local_world_size):
            ending_path(self.run, local_rank).unlink(missing_ok=True)
        worker = ["-m", _WORKER, str(self.run)]
        if not self.plan.card.is_cpu:
            configuration, deepspeed = folder / "accelerate.yaml", folder / "deepspeed.json"
            if settings.launch.strategy == "deepspeed":
                write_json(deepspeed, deepspeed_configuration(settings))
            configuration.write_text(dump(accelerate_configuration(settings, deepspeed)), encoding="utf-8")
            return [sys.executable, "-m", "accelerate.commands.launch", "--config_file", str(configuration), *worker]
        launch = settings.launch
        rendezvous = [
            f"--nnodes={launch.num_machines}", f"--node-rank={launch.machine_rank}", f"--master-addr={launch.main_process_ip}",
            f"--master-port={launch.main_process_port}",
        ] if launch.num_machines > 1 else ["--standalone", "--local-addr=127.0.0.1"]  # fmt: skip
        # accelerate can't launch ranks on the CPU
        ranks = f"--nproc-per-node={self.local_world_size}"
        return [sys.executable, "-m", "torch.distributed.run", *rendezvous, ranks, *worker]

    def environment(self) -> dict[str, str]:
        variables = {"TORCH_ELASTIC_SHUTDOWN_TIMEOUT": str(SHUTDOWN_S)}
        if "OMP_NUM_THREADS" not in os.environ:
            variables["OMP_NUM_THREADS"] = str(max(1, (psutil.cpu_count(logical=False) or 1) // self.local_world_size))
        return variables

    def send_signal(self, launcher: subprocess.Popen[bytes], number: int) -> None:
        # to the ranks, not to the launcher: it would end the ranks in the middle of a step
        with contextlib.suppress(psutil.NoSuchProcess):
            for child in psutil.Process(launcher.pid).children():
                with contextlib.suppress(psutil.NoSuchProcess, psutil.AccessDenied):
                    if _WORKER in child.cmdline():
                        child.send_signal(number)

    def exit_status(self, code: int, emit: Callable[[Event], None]) -> int:
        """Return one exit status for all local ranks; emit the event of the failure. `code`: the launcher's exit status."""
        local_ranks = range(self.local_world_size)
        endings = {rank: ending for rank in local_ranks if (ending := read_object(ending_path(self.run, rank)))}
        if 0 in endings and endings[0]["exit_code"] in COMMON_EXITS:  # local rank 0 has written the event
            return int(endings[0]["exit_code"])
        if not endings:  # no rank wrote a final event
            return code
        cause = min(endings.values(), key=lambda ending: _CAUSE_ORDER.index(ending["exit_code"]))
        killed = [str(rank) for rank in local_ranks if rank not in endings]
        message, resume = "", f"with: finetune resume {self.run}"
        if killed and cause["exit_code"] == FAILED:  # lost connections of the remaining ranks follow from the kill
            reason = f"process {', '.join(killed)} of {self.local_world_size} was killed (often: out of host memory)"
            message = f"{reason}, see {self.log}; resume from the last checkpoint {resume}"
        elif cause["exit_code"] == FAILED and self.plan.settings.launch.num_machines > 1:
            # any process on any machine may have failed first: the remaining processes only report a lost connection
            reason = f"a process ended, or its machine could not be reached ({cause['event'].get('message', '')[:200]})"
            message = f"{reason}, see log.txt on each machine; resume on every machine {resume}"
        emit(State(state="failed", exit_code=FAILED, message=message) if message else event_from(cause["event"]))
        return int(cause["exit_code"])


#: The first of these exit statuses is the cause when ranks end differently.
_CAUSES = sorted(errors.CAUSES, key=lambda code: (code != errors.OutOfMemory.exit_code, -code))
_CAUSE_ORDER = (*_CAUSES, FAILED, *reversed(errors.STOPPED), errors.FINISHED)
