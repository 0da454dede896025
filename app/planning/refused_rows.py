"""Rows that can't be trained on: by kind, from their file, corrected."""

from __future__ import annotations

import json
import re
import secrets
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

from finetune.errors import RecipeError

from ..workspace import Workspace

WRONG_ROLE = re.compile(r"unknown role '(.{1,40})'; did you mean (\w+)\?")
#: Files with a row per line.
_LINES = (".jsonl", ".ndjson")
_SHOWN_CHARACTERS = 4000


@dataclass(frozen=True)
class Problem:
    """Refused rows of one kind."""

    kind: str
    rows: tuple[dict[str, Any], ...]

    @property
    def reason(self) -> str:
        # without the place in the row
        field = re.sub(r"\[\d+\]", "[]", self.rows[0]["field"] or "")
        return self.kind.removeprefix(field).strip()

    @property
    def correction(self) -> tuple[str, str] | None:
        # wrong and intended role of the first row, if every row has both
        matches = [WRONG_ROLE.search(row["reason"]) for row in self.rows]
        return (matches[0][1], matches[0][2]) if matches[0] and all(matches) else None


def problems_of(answer: dict[str, Any]) -> list[Problem]:
    """Return the refused rows by kind, largest first."""
    groups: dict[str, list[dict[str, Any]]] = {}
    for kind, row in zip(answer["kinds"], answer["report"]["rows_refused"], strict=True):
        groups.setdefault(kind, []).append(row)
    return sorted((Problem(kind, tuple(rows)) for kind, rows in groups.items()), key=lambda problem: -len(problem.rows))


def source_text(root: Path, row: dict[str, Any]) -> str:
    """Return the row's line in its file."""
    path = root / row["file"]
    # a row of another format is not a line
    if path.suffix not in (*_LINES, ".csv", ".tsv"):
        return ""
    try:
        with path.open(encoding="utf-8", errors="replace") as file:
            return next(islice(file, row["row"] - 1, row["row"]), "")[:_SHOWN_CHARACTERS].strip()
    except OSError:
        return ""


def with_roles_corrected(workspace: Workspace, rows: Sequence[dict[str, Any]]) -> str:
    """Write a file with corrected roles; return its path. Raises RecipeError."""
    paths = {workspace.root / row["file"] for row in rows}
    if len(paths) != 1 or next(iter(paths)).suffix not in _LINES:
        raise RecipeError("only JSONL files can be corrected here", "Correct the rows in the file.")
    path = paths.pop()
    numbers = {row["row"] for row in rows}
    meant = {match[1]: match[2] for row in rows if (match := WRONG_ROLE.search(row["reason"]))}
    target = workspace.folder("uploads") / f"{path.stem[:60]}-corrected-{secrets.token_hex(3)}.jsonl"
    with path.open(encoding="utf-8") as source, target.open("w", encoding="utf-8") as copy:
        for number, line in enumerate(source, 1):
            copy.write(_corrected(line, meant) if number in numbers else line)
    return workspace.shown(target)


def _corrected(line: str, meant: dict[str, str]) -> str:
    row = json.loads(line)
    for messages in row.values():
        for message in messages if isinstance(messages, list) else []:
            for key in ("role", "from"):
                if isinstance(message, dict) and message.get(key) in meant:
                    message[key] = meant[message[key]]
    return json.dumps(row, ensure_ascii=False) + "\n"
