"""Queue of runs for a GPU, by ticket files. A ticket is valid while its process lives."""

from __future__ import annotations

import os
import time
from collections.abc import Sequence
from pathlib import Path

from finetune.files import cache_dir, read_object, write_json
from finetune.run.state import is_recorded_process, process_record
from finetune.system import take_lock

_JOIN_S = 10.0  # limit of the wait for another run's `join`, which takes milliseconds


class Queue:
    """Queue of runs that share GPUs, by UUID or name."""

    def __init__(self, cards: Sequence[str]) -> None:
        # the folder holds the tickets of all runs of this user
        self.folder, self.cards = cache_dir() / "queue", list(cards)

    def join(self, run: Path) -> None:
        self.folder.mkdir(parents=True, exist_ok=True)
        lock = take_lock(self.folder / "lock", wait_s=_JOIN_S)  # else a ticket could appear ahead of a started run
        try:
            taken = (ticket.name.partition("-")[0] for ticket in self.folder.glob("*.json"))
            last = max((int(number) for number in taken if number.isdecimal()), default=0)
            # not the time alone: the clock may have been set back
            self._ticket = self.folder / f"{max(time.time_ns(), last + 1):020d}-{os.getpid()}.json"
            write_json(self._ticket, {**process_record(os.getpid()), "run": str(run.resolve()), "cards": self.cards})
        finally:
            if lock is not None:
                lock.release()

    def ahead(self) -> list[str]:
        ahead = []
        for ticket in sorted(self.folder.glob("*.json")):
            if (record := read_object(ticket)) is None:  # removed meanwhile, or incomplete
                continue
            if not is_recorded_process(record):
                ticket.unlink(missing_ok=True)
            elif ticket.name < self._ticket.name and not set(self.cards).isdisjoint(record.get("cards", ())):
                ahead.append(record["run"])
        return ahead

    def leave(self) -> None:
        self._ticket.unlink(missing_ok=True)
