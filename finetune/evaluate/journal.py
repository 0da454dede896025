"""Answers and losses in a file as they are made: a killed evaluation goes on, and another score needs no new answers.

RUN/evaluations/<model>-<key>.jsonl; the key is of everything that decides an answer but the row itself.
"""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any


class Journal:
    """What is known of rows, by a digest of the row. A line that a killed process left torn is ignored."""

    def __init__(self, folder: Path, model: str, facts: Any) -> None:
        self._path = folder / f"{model}-{digest(facts)}.jsonl"
        self.known: dict[str, dict[str, Any]] = {}
        self.problem = ""
        try:
            lines = self._path.read_bytes().split(b"\n")
        except OSError:
            lines = []
        for line in lines:
            try:
                entry = json.loads(line)
                self.known[entry.pop("row")] = entry
            except (ValueError, KeyError, TypeError, AttributeError):
                continue

    def add(self, entries: dict[str, dict[str, Any]]) -> None:
        """Keep them in the file too; without room or permission only in memory, and `problem` says why."""
        self.known.update(entries)
        lines = "".join(json.dumps({"row": row, **entry}) + "\n" for row, entry in entries.items())
        try:
            self._path.parent.mkdir(exist_ok=True)
            with self._path.open("ab", buffering=0) as file:  # it begins with a new line: the last one may be torn
                file.write(b"\n" + lines.encode())
        except OSError as error:
            self.problem = f"answers are not kept for a later evaluation: {error}"


def digest(facts: Any) -> str:
    """A short hash of JSON values."""
    return hashlib.sha256(json.dumps(facts, sort_keys=True, default=str).encode()).hexdigest()[:24]
