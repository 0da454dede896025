"""Append computed answers and losses to a file, for killed evaluations and other scores."""

from __future__ import annotations

import contextlib
import hashlib
import json
from pathlib import Path
from typing import Any

from finetune.checksum import with_checksum
from finetune.files import parse_checked


class Journal:
    """Entries by a digest of the row."""

    def __init__(self, folder: Path, model: str, inputs: Any) -> None:
        # RUN/evaluations/<model>-<key>.jsonl; the key covers all that decides an answer except the row
        self._path = folder / f"{model}-{digest(inputs)}.jsonl"
        self.entries: dict[str, dict[str, Any]] = {}
        self.problem = ""
        lines: list[bytes] = []
        with contextlib.suppress(OSError):
            lines = self._path.read_bytes().split(b"\n")
        for line in lines:
            # a killed process leaves an incomplete line
            with contextlib.suppress(ValueError, KeyError, TypeError, AttributeError):
                entry = parse_checked(line)
                self.entries[entry.pop("row")] = entry

    def add(self, entries: dict[str, dict[str, Any]]) -> None:
        """Add entries, also to the file; `problem` says why it can't be written."""
        self.entries.update(entries)
        lines = "".join(with_checksum(json.dumps({"row": row, **entry})) + "\n" for row, entry in entries.items())
        try:
            self._path.parent.mkdir(exist_ok=True)
            with self._path.open("ab", buffering=0) as file:  # begins with a new line: the last one may be incomplete
                file.write(b"\n" + lines.encode())
        except OSError as error:
            self.problem = f"answers are not kept for a later evaluation: {error}"


def digest(values: Any) -> str:
    """Return a short hash of JSON values."""
    return hashlib.sha256(json.dumps(values, sort_keys=True, default=str).encode()).hexdigest()[:24]
