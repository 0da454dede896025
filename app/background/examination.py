"""`finetune doctor` for the page: in a process of its own, as it imports torch; its last answer is a file."""

from __future__ import annotations

import subprocess
import sys
import threading
import time
from typing import Any

from finetune.errors import FinetuneError
from finetune.files import parse_json, read_object, write_json

from ..process import environment
from ..workspace import Workspace

_DEADLINE_S = 300


class Examination:
    """Starts one examination at a time, and has the findings of the last."""

    def __init__(self, workspace: Workspace) -> None:
        self._workspace, self._path = workspace, workspace.state / "doctor.json"
        self._thread: threading.Thread | None = None

    @property
    def is_running(self) -> bool:
        return self._thread is not None and self._thread.is_alive()

    def start(self) -> None:
        """Examine the machine; nothing when that goes on already."""
        if not self.is_running:
            self._thread = threading.Thread(target=self._examine, daemon=True)
            self._thread.start()

    def last(self) -> dict[str, Any] | None:
        """The last answer: `findings`, and `time_s`, when it was; None when there is none."""
        return read_object(self._path)

    def _examine(self) -> None:
        command = [sys.executable, "-P", "-m", "finetune", "doctor", "--json"]
        try:
            process = subprocess.run(
                command, cwd=self._workspace.root, env=environment(), stdin=subprocess.DEVNULL, capture_output=True, text=True,
                timeout=_DEADLINE_S, check=False,
            )  # fmt: skip
            answer = parse_json(process.stdout.strip().split("\n")[-1])
        except (OSError, ValueError, IndexError, FinetuneError, subprocess.TimeoutExpired) as error:
            answer = {"findings": [{"check": "doctor", "state": "fail", "what": f"gave no answer: {error}", "fix": ""}]}
        write_json(self._path, {**answer, "time_s": time.time()})
