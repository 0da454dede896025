"""State that all pages share."""

from __future__ import annotations

import shutil
from pathlib import Path

from .background import Queue, Tasks
from .chats import Chats
from .live import LiveRuns
from .planning.draft import Draft
from .worker import Worker
from .workspace import Workspace

#: Seconds of silence after which the planner is killed.
_SILENT_S = 300.0


class Context:
    """State of one app."""

    def __init__(self, workspace: Workspace, temporary: Path) -> None:
        self.workspace, self._temporary = workspace, temporary
        #: Folder of browser uploads.
        self.uploads = temporary / "files"
        self.lives = LiveRuns()
        self.draft = Draft(workspace)
        log = workspace.folder("planner") / "log.txt"
        self.planner = Worker(workspace, ".planning.process", log=log, silent_s=_SILENT_S)
        self.queue = Queue(workspace)
        self.chats = Chats(workspace)
        self.tasks = Tasks(workspace)

    def close(self) -> None:
        # runs and the queue are other processes, and continue
        self.planner.close()
        self.chats.close()
        # uploads that no recipe and no message has taken
        shutil.rmtree(self._temporary, ignore_errors=True)
