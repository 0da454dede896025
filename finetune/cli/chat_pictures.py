"""Pictures in a chat: `/image PATH` adds one to the next message."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from finetune.data.pictures.placement import PICTURE_MARK
from finetune.data.pictures.source import BadPicture, PictureSource, checked_size, digest_of, read_bytes
from finetune.errors import CommandError

if TYPE_CHECKING:
    from finetune.evaluate.answerer import Answerer

COMMAND = "/image"


class ChatPictures:
    """The pictures that wait for a chat's next message."""

    def __init__(self) -> None:
        self._waiting: list[PictureSource] = []

    def add(self, command: str, answerer: Answerer) -> str:
        """Add the picture that `/image PATH` names; returns what to say. Raises CommandError."""
        if not answerer.plan.settings.vision:
            raise CommandError(f"{answerer.run.path.name} was trained on text; its model is loaded without a vision tower", "")
        path = Path(command.removeprefix(COMMAND).strip()).expanduser()
        try:
            content = read_bytes(path)
            width, height = checked_size(content)
        except BadPicture as error:
            raise CommandError(f"{path} {error}", "Give a picture's file:  /image PATH") from None
        self._waiting.append(PictureSource(path, None, digest_of(content), width, height))
        return f"{path.name}, {width:,} x {height:,} pixels, goes with the next message"

    def message(self, text: str) -> tuple[dict[str, Any], list[PictureSource]]:
        """A user's message with the waiting pictures before its text, which then has no other mark of one; and the pictures."""
        pictures, self._waiting = self._waiting, []
        if not pictures:
            return {"role": "user", "content": text}, []
        content = PICTURE_MARK * len(pictures) + text.replace(PICTURE_MARK, "")
        return {"role": "user", "content": content, "pictures": len(pictures)}, pictures
