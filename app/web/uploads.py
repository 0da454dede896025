"""Limits uploads: few at once, and a fixed total size on disk."""

from __future__ import annotations

import shutil
import time
from pathlib import Path

from .guard import UPLOAD_PATH, Asgi, Receive, Refusal, Scope, Send, answer

AT_ONCE = 2
MOST_BYTES = 512 * 2**20
MOST_AGE_S = 3600.0


class UploadLimit:
    """Refuses uploads over AT_ONCE at a time (429) and when MOST_BYTES are used (507), after removing old ones."""

    def __init__(self, app: Asgi, folder: Path) -> None:
        self.app, self.folder, self._running = app, folder, 0

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """One request."""
        if scope["type"] != "http" or scope["path"].rstrip("/") != UPLOAD_PATH:
            return await self.app(scope, receive, send)
        if self._running >= AT_ONCE:
            return await answer(send, Refusal(429, "Other uploads are running; try again when they are done."))
        if self._used_bytes() > MOST_BYTES:
            return await answer(send, Refusal(507, "There is no space for more uploads now."))
        self._running += 1
        try:
            await self.app(scope, receive, send)
        finally:
            self._running -= 1

    def _used_bytes(self) -> int:
        taken = 0
        for entry in self.folder.iterdir():
            if time.time() - entry.stat().st_mtime > MOST_AGE_S:
                shutil.rmtree(entry, ignore_errors=True)
            else:
                taken += sum(path.stat().st_size for path in entry.rglob("*") if path.is_file())
        return taken
