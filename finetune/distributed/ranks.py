"""Helpers for ranks; no-ops at world size 1."""

from __future__ import annotations

import ctypes
import os
import signal
import sys
from dataclasses import dataclass
from pathlib import Path

from finetune import errors
from finetune.events import Event, EventWriter, OutOfMemory, State, event_json
from finetune.files import write_json

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
