"""One run at a time on a card: the others wait in order, by ticket files. A ticket is valid while its process lives."""

from __future__ import annotations

import json
import os
import time
from pathlib import Path

from finetune.files import cache_dir, write_json
from finetune.run.state import process_is, process_record


class Queue:
    """The queue of one card. `folder` is shared by all runs of this user on this machine."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._ticket: Path | None = None

    def join(self, run: Path) -> None:
        """Add the calling process to the end of the queue."""
        self.folder.mkdir(parents=True, exist_ok=True)
        self._ticket = self.folder / f"{time.time_ns():020d}-{os.getpid()}.json"
        write_json(self._ticket, {**process_record(os.getpid()), "run": str(run.resolve())})

    def ahead(self) -> list[str]:
        """Run directories ahead in the queue, in order; empty when it is the caller's turn."""
        return [run for ticket, run in self._living() if self._ticket is None or ticket.name < self._ticket.name]

    def leave(self) -> None:
        """Leave the queue; the next run starts."""
        if self._ticket is not None:
            self._ticket.unlink(missing_ok=True)
            self._ticket = None

    def _living(self) -> list[tuple[Path, str]]:
        living = []
        for ticket in sorted(self.folder.glob("*.json")):
            try:
                record = json.loads(ticket.read_text(encoding="utf-8"))
            except (OSError, ValueError):  # just removed, or being written
                continue
            if process_is(record):
                living.append((ticket, record["run"]))
            else:
                ticket.unlink(missing_ok=True)
        return living


def card_queue(card_name: str) -> Queue:
    """The queue of a card of this machine."""
    name = "".join(letter if letter.isalnum() else "-" for letter in card_name.lower())
    return Queue(cache_dir() / "queue" / name)
