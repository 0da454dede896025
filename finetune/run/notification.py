"""Tells that a run has ended: on the desktop (notify-send), or by Apprise, which knows its own services and secrets.

Apprise reads APPRISE_URLS or its configuration file; a recipe never has an address or a token.
"""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

from finetune.events import State

_DEADLINE_S = 20.0
_PROGRAMS = {"desktop": "notify-send", "apprise": "apprise"}
_INSTALL = {"desktop": "apt-get install libnotify-bin", "apprise": "pip install apprise"}


def missing_notifier(name: str) -> list[str]:
    """One line, with the install command, when the program for these notifications is missing."""
    if name == "none" or shutil.which(_PROGRAMS[name]):
        return []
    return [f"notify={name} needs the program {_PROGRAMS[name]}: {_INSTALL[name]}"]


def notify(name: str, run: Path, state: State) -> str:
    """Send the run's last state; returns why that failed, empty when it did not. Never raises, and waits for 20 s at most."""
    if name == "none":
        return ""
    title, text = f"{run.name}: {state.state}", state.message or ""
    program = _PROGRAMS[name]
    how = ["--app-name=finetune", "--", title, text] if name == "desktop" else [f"--title={title}", f"--body={text or title}"]
    try:
        completed = subprocess.run(
            [program, *how], stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=_DEADLINE_S, check=False
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        return f"no notification was sent: {program}: {error}"
    output = (completed.stderr or completed.stdout).strip().splitlines()
    problem = output[-1] if output else completed.returncode
    return f"no notification was sent: {program}: {problem}" if completed.returncode else ""
