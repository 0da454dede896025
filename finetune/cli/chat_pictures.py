"""Pictures in a chat: `/image PATH` adds one to the next message."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from finetune.data.pictures.source import BadPicture, PictureSource, picture_file
from finetune.errors import CommandError

if TYPE_CHECKING:
    from finetune.evaluate.answerer import Answerer

COMMAND = "/image"


class ChatPictures:
    """The pictures that wait for the next message."""

    def __init__(self) -> None:
        self._waiting: list[PictureSource] = []

    def add(self, command: str, answerer: Answerer) -> str:
        """Add the picture that `/image PATH` names; returns what to say. Raises CommandError."""
        answerer.require_vision()
        path = Path(command.removeprefix(COMMAND).strip()).expanduser()
        try:
            picture = picture_file(path)
        except BadPicture as error:
            raise CommandError(f"{path} {error}", "Give a picture's file:  /image PATH") from None
        self._waiting.append(picture)
        return f"{path.name}, {picture.width:,} x {picture.height:,} pixels, goes with the next message"

    def take(self) -> list[PictureSource]:
        """The pictures of the next message, which no longer wait."""
        waiting, self._waiting = self._waiting, []
        return waiting
