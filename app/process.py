"""Processes of the app's own modules, run by this Python in the folder where the user started the app."""

from __future__ import annotations

import os
import sys
from pathlib import Path

from finetune.privacy import SETTINGS
from finetune.system import start_detached


def command(module: str, *arguments: str) -> list[str]:
    """The command line of a module of this package, such as ".chat.process", under the name that this process has for it.

    `-P`: a folder called app or finetune in the user's folder is not ours.
    """
    return [sys.executable, "-P", "-m", f"{__package__}{module}", *arguments]


def environment() -> dict[str, str]:
    """Environment without the app's token, with telemetry off, and UTF-8 for all that is read and written."""
    values = {key: value for key, value in os.environ.items() if key not in ("FINETUNE_UI_TOKEN", "GRADIO_TEMP_DIR")}
    return {**values, **SETTINGS, "TOKENIZERS_PARALLELISM": "false", "PYTHONUTF8": "1"}


def detach(root: Path, module: str, *arguments: str, log: Path) -> int:
    """Start a process in `root` that outlives the app. Returns its id."""
    with log.open("ab") as file:
        return start_detached(command(module, *arguments), file, cwd=root, env=environment()).pid
