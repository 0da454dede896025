"""One run at a time on a card: other runs wait in order, by ticket files. A ticket is valid while its process lives."""

from __future__ import annotations

import os
import time
from collections.abc import Sequence
from pathlib import Path

from finetune.files import cache_dir, read_object, write_json
from finetune.run.state import is_record, is_recorded_process, process_record
from finetune.system import take_lock

#: Seconds to wait for another run that joins; each takes milliseconds.
_JOIN_S = 10.0


class Queue:
    """The queue of the runs that share a card with this one. `folder` is all runs' of this user on this machine."""

    def __init__(self, folder: Path, cards: Sequence[str]) -> None:
        self.folder, self.cards = folder, list(cards)

    def join(self, run: Path) -> None:
        """Add the calling process to the end of the queue, also when the clock has been set back."""
        self.folder.mkdir(parents=True, exist_ok=True)
        lock = take_lock(self.folder / "lock", wait_s=_JOIN_S)  # else a ticket could appear before one that has seen it missing
        try:
            taken = (ticket.name.partition("-")[0] for ticket in self.folder.glob("*.json"))
            last = max((int(number) for number in taken if number.isdecimal()), default=0)
            self._ticket = self.folder / f"{max(time.time_ns(), last + 1):020d}-{os.getpid()}.json"
            write_json(self._ticket, {**process_record(os.getpid()), "run": str(run.resolve()), "cards": self.cards})
        finally:
            if lock is not None:
                lock.release()

    def ahead(self) -> list[str]:
        """Run directories ahead in the queue, in order; empty when it is the caller's turn."""
        ahead = []
        for ticket in sorted(self.folder.glob("*.json")):
            if (record := read_object(ticket)) is None:  # just removed, or being written
                continue
            if not is_record(record) or not is_recorded_process(record):
                ticket.unlink(missing_ok=True)
            elif ticket.name < self._ticket.name and not set(self.cards).isdisjoint(record.get("cards", ())):
                ahead.append(record["run"])
        return ahead

    def leave(self) -> None:
        """Leave the queue; the next run starts."""
        self._ticket.unlink(missing_ok=True)


def card_queue(cards: Sequence[str]) -> Queue:
    """The queue for cards of this machine, by UUID or name."""
    return Queue(cache_dir() / "queue", cards)
