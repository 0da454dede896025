"""This process among those that train together: who leads, who writes events, and what all agree on. Alone, it does nothing.

One process of each machine leads: it writes that machine's run directory (events, seals, adapter). Every process keeps its last
word in a file for its supervisor, which makes one failure of many.
"""

from __future__ import annotations

import ctypes
import json
import os
import signal
import sys
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any

from finetune.events import EventWriter, OutOfMemory, State, event_json
from finetune.files import write_json

if TYPE_CHECKING:
    from finetune.events import Event

#: Ends that every process reaches at the same step, so that all wait for the leader before they exit.
TOGETHER = (0, 6, 130, 143)
_PR_SET_PDEATHSIG = 1
_PEERS_KEY = "finetune/out_of_memory"


@dataclass(frozen=True)
class Rank:
    """Number of this process in all, on its machine, and how many there are. A process of its own is 0 of 1."""

    number: int = 0
    local: int = 0
    world: int = 1

    @property
    def leads(self) -> bool:
        """Whether this process writes its machine's run directory."""
        return self.local == 0


def this_rank() -> Rank:
    """As torchrun says in the environment of the processes it starts."""
    if "TORCHELASTIC_RUN_ID" not in os.environ:
        return Rank()
    return Rank(*(int(os.environ[name]) for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE")))


def ending_path(run: Path, local: int) -> Path:
    """Where the process `local` of this machine keeps its last word, in the run directory `run`."""
    return run / "launch" / f"ending-{local}.json"


def event_writer(events: Path, rank: Rank) -> EventWriter:
    """The writer of a run's events.jsonl, or for one of many processes one that lets only the leader write."""
    return EventWriter(events) if rank.world == 1 else RankEvents(events, rank)


class RankEvents(EventWriter):
    """Events of one process of many: the leader's are written, failures are kept for the supervisor, the rest is dropped."""

    def __init__(self, events: Path, rank: Rank) -> None:
        super().__init__(events)
        self._rank, self._ending = rank, ending_path(events.parent, rank.local)

    def emit(self, event: Event) -> None:
        """Write, keep or drop one event."""
        code = 5 if isinstance(event, OutOfMemory) else event.exit_code if isinstance(event, State) else None
        if code is not None:
            self._keep_ending(event, code)
        if self._rank.leads and (code is None or code in TOGETHER):
            super().emit(event)

    def _keep_ending(self, event: Event, code: int) -> None:
        if code == 5:
            _tell_peers(self._rank.number)
        elif code == 1 and (culprit := _told_by_peers()) is not None:  # a lost connection, because another ran out of memory
            event, code = OutOfMemory(phase="train", message=f"process {culprit} on another machine ran out of memory"), 5
        self._ending.parent.mkdir(exist_ok=True)
        write_json(self._ending, {"rank": self._rank.number, "exit_code": code, "event": event_json(event)})


def join(rank: Rank, on_cpu: bool) -> None:
    """Before anything is loaded: use the card of this rank, and end when the launcher dies."""
    if rank.world == 1:
        return
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)
    if not on_cpu:
        import torch

        torch.cuda.set_device(rank.local)


def leave(rank: Rank, code: int) -> int:
    """The process's exit status: its own `code` when alone; else 0 for an end that all reach together, after all have."""
    if rank.world == 1:
        return code
    if code not in TOGETHER:
        return 1
    import torch.distributed as dist

    if dist.is_initialized():
        dist.barrier()
        dist.destroy_process_group()
    return 0


def wait_for_all() -> None:
    """Go on when every process has come here."""
    import torch.distributed as dist

    if dist.is_initialized():
        dist.barrier()


def highest(number: int) -> int:
    """The highest `number` of all processes."""
    return int(_reduced([number], "MAX")[0])


def lowest(number: int) -> int:
    """The lowest `number` of all processes."""
    return -highest(-number)


def totals(numbers: list[int]) -> list[int]:
    """Sums over all processes, number by number."""
    return _reduced(numbers, "SUM")


def _reduced(numbers: list[int], operation: str) -> list[int]:
    import torch
    import torch.distributed as dist

    if not dist.is_initialized():
        return numbers
    device = "cuda" if "nccl" in dist.get_backend() else "cpu"
    values = torch.tensor(numbers, dtype=torch.int64, device=device)
    dist.all_reduce(values, getattr(dist.ReduceOp, operation))
    return [int(value) for value in values.tolist()]


def _tell_peers(number: int) -> None:
    store = _store()
    if store is not None:
        store.set(_PEERS_KEY, json.dumps(number))


def _told_by_peers() -> int | None:
    store = _store()
    try:
        return json.loads(store.get(_PEERS_KEY)) if store is not None and store.check([_PEERS_KEY]) else None
    except RuntimeError:  # the launcher that keeps the store is gone, too
        return None


def _store() -> Any:
    """The launcher's key-value store, which outlives a process that ran out of memory; None when it can't be reached."""
    import torch.distributed as dist

    try:
        port = int(os.environ["MASTER_PORT"])
        return dist.TCPStore(os.environ["MASTER_ADDR"], port, is_master=False, timeout=timedelta(seconds=2))
    except (RuntimeError, KeyError):
        return None
