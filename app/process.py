"""Helper processes: the app's own modules run by this Python, in the folder where the user started the app."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import IO, Any

from finetune.privacy import SETTINGS
from finetune.system import start_detached

from .workspace import Workspace


def command(module: str, *arguments: str) -> list[str]:
    """The command line of a module of this package, such as ".chat.process", under the name that this process has for it.

    `-P`: a folder called app or finetune in the user's folder is not ours.
    """
    return [sys.executable, "-P", "-m", f"{__package__}{module}", *arguments]


def environment() -> dict[str, str]:
    """Environment without the app's token, with telemetry off, and UTF-8 for all that is read and written."""
    values = {key: value for key, value in os.environ.items() if key not in ("FINETUNE_UI_TOKEN", "GRADIO_TEMP_DIR")}
    return {**values, **SETTINGS, "TOKENIZERS_PARALLELISM": "false", "PYTHONUTF8": "1"}


def detach(workspace: Workspace, module: str, *arguments: str, log: Path) -> int:
    """Start a process that outlives the app, output to `log`. Returns its id."""
    with log.open("ab") as file:
        return start_detached(command(module, *arguments), file, cwd=workspace.root, env=environment()).pid


def start_helper(workspace: Workspace, module: str, *arguments: str, log: Path) -> subprocess.Popen[str]:
    """Start a process that reads and writes lines of JSON and ends with the app, when its standard input closes."""
    with log.open("ab") as file:
        return subprocess.Popen(
            command(module, *arguments), stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=file, cwd=workspace.root,
            text=True, encoding="utf-8", env=environment(),
        )  # fmt: skip


def redirect_stdout() -> IO[str]:
    """Reserve standard output for the answers: what libraries print goes to standard error."""
    ours: Any = os.fdopen(os.dup(1), "w", encoding="utf-8", buffering=1)
    os.dup2(2, 1)
    return ours
