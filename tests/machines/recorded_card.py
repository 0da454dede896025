"""A card that a machine without one is given: every call of `finetune.card.cuda` is written down, with its numbers.

`broken`: an error that a function raises, or what is called with all calls so far and may raise one.
"""

import json
import os

from killed import start_worker

from finetune.card import cuda
from finetune.units import MIB

RESERVED, SEGMENTS = 1024 * MIB, 40
NAMES = [name for name, function in vars(cuda).items() if getattr(function, "__module__", "") == cuda.__name__]


class RecordedCard:
    """Replaces the module's functions, in this process and its forks; the model stays on the CPU."""

    def __init__(self, file, total_bytes, free_bytes, uuid="", broken=None):
        self.file = file
        file.touch()
        self.answers = {
            "device_of": "cpu", "uuid": uuid, "total_bytes": total_bytes, "free_bytes": free_bytes,
            "allocator_bytes": {
                "allocated_bytes": RESERVED // 2, "peak_allocated_bytes": RESERVED // 2, "reserved_bytes": RESERVED,
                "peak_reserved_bytes": RESERVED, "inactive_split_bytes": 0,
                "segments": SEGMENTS, "peak_segments": SEGMENTS + 1, "allocation_retries": 0,
            },
        }  # fmt: skip
        self.broken = broken or {}

    def insert(self, monkeypatch):
        for name in NAMES:
            monkeypatch.setattr(cuda, name, self._recording(name))
        return self

    def calls(self):
        return [json.loads(line) for line in self.file.read_text().splitlines()]

    def limit_bytes(self):
        """What the allocator may reserve, by the last limit that it was given."""
        return [arguments[0] for name, *arguments in self.calls() if name == "limit_reserved"][-1]

    def _recording(self, name):
        def call(*arguments):
            with self.file.open("a") as file:
                file.write(json.dumps([name, *arguments], default=str) + "\n")
            broken = self.broken.get(name)
            if isinstance(broken, Exception):
                raise broken
            if broken:
                broken(self.calls())
            return self.answers.get(name)

        return call


def train(run):
    """Exit status of a worker, which keeps this process's machine and recorded card."""
    return os.waitstatus_to_exitcode(os.waitpid(start_worker(run), 0)[1])
