"""What all pages share: workspace, followed runs, draft recipe, queue and workers."""

from __future__ import annotations

import shutil
from pathlib import Path

from .background.queue import Queue
from .background.tasks import Tasks
from .chat.chats import Chats
from .live import LiveRuns
from .planning.draft import Draft
from .scores import Scores
from .worker import Worker
from .workspace import Workspace

#: Seconds without a message after which the planner is killed.
_SILENT_S = 300.0


class Context:
    """State of one app. `close` ends the planner and the chat; runs and the queue continue."""

    def __init__(self, workspace: Workspace, temporary: Path) -> None:
        self.workspace, self._temporary = workspace, temporary
        #: Where Gradio puts what a browser uploads.
        self.uploads = temporary / "files"
        self.lives = LiveRuns()
        self.scores = Scores()
        self.draft = Draft(workspace)
        log = workspace.folder("planner") / "log.txt"
        self.planner = Worker(workspace, ".planning.process", log=log, silent_s=_SILENT_S)
        self.queue = Queue(workspace)
        self.chats = Chats(workspace)
        self.tasks = Tasks(workspace)

    def close(self) -> None:
        """End the planner and the chat; remove unused uploads."""
        self.planner.close()
        self.chats.close()
        shutil.rmtree(self._temporary, ignore_errors=True)
