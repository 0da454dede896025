"""Processes of the app's modules."""

from __future__ import annotations

import os
import sys
from pathlib import Path

from finetune.privacy import SETTINGS
from finetune.system import start_detached


def command(module: str, *arguments: str) -> list[str]:
    """Return the command line of a module, such as ".chat.process"."""
    # -P: a folder called app or finetune in the user's folder must not be imported
    return [sys.executable, "-P", "-m", f"{__package__}{module}", *arguments]


def environment() -> dict[str, str]:
    """Return the environment of the app's processes."""
    # without the app's token: other processes must not leak the token
    values = {key: value for key, value in os.environ.items() if key not in ("FINETUNE_UI_TOKEN", "GRADIO_TEMP_DIR")}
    return {**values, **SETTINGS, "TOKENIZERS_PARALLELISM": "false", "PYTHONUTF8": "1"}


def detach(root: Path, module: str, *arguments: str, log: Path) -> int:
    """Start a process that outlives the app; return its id."""
    with log.open("ab") as file:
        return start_detached(command(module, *arguments), file, cwd=root, env=environment()).pid
