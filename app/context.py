"""What all pages share: workspace, followed runs, draft recipe, queue and helper processes."""

from __future__ import annotations

import shutil
from pathlib import Path

from .background.queue import Queue
from .background.tasks import Tasks
from .chat.chats import Chats
from .live import LiveRuns
from .planning.draft import Draft
from .planning.planner import Planner
from .scores import Scores
from .workspace import Workspace


class Context:
    """State of one app. `close` ends the planner and the chat; runs and the queue continue."""

    def __init__(self, workspace: Workspace, temporary: Path) -> None:
        self.workspace, self._temporary = workspace, temporary
        self.lives = LiveRuns(workspace.folder("series"))
        self.scores = Scores()
        self.draft = Draft(workspace)
        self.planner = Planner(workspace)
        self.queue = Queue(workspace)
        self.chats = Chats(workspace)
        self.tasks = Tasks(workspace)

    def close(self) -> None:
        """End the planner and the chat; remove unused uploads."""
        self.planner.close()
        self.chats.close()
        shutil.rmtree(self._temporary, ignore_errors=True)
