"""Conversations with models of runs: a separate process generates, a file has the messages.

The page sends a question to the process, which writes it and the answers to RUNS/.app/chat/<run>.jsonl; every tab reads the
same file, and closing a tab loses nothing.
"""

from __future__ import annotations

import json
import subprocess
import threading
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from finetune.events import Event, read_events
from finetune.run.directory import RunDirectory

from ..process import start_helper
from ..workspace import Workspace

#: After this long without a question the chat process ends and frees its memory.
IDLE_S = 600.0
#: Folder of the pictures of all conversations, beside their files.
PICTURES = "pictures"
Model = Literal["base", "tuned"]
MODELS: tuple[Model, ...] = ("base", "tuned")


class Question(Event, kind="question"):
    """A question of the page."""

    id: str
    text: str
    models: tuple[Model, ...] = MODELS
    #: Names of its files.
    pictures: tuple[str, ...] = ()


class Piece(Event, kind="piece"):
    """The next piece of an answer that is being generated, and of its thought."""

    id: str
    model: Model
    text: str
    thought: str = ""


class Answer(Event, kind="answer"):
    """The whole answer of a model to question `id`, with its tool calls."""

    id: str
    model: Model
    text: str
    tokens: int = 0
    tokens_per_s: float | None = None
    stopped: bool = False
    calls: tuple[dict[str, Any], ...] = ()
    thought: str = ""


class Done(Event, kind="done"):
    """All models that were asked have answered, or why not."""

    id: str
    error: str = ""


KINDS: dict[str, type[Event]] = {event.kind: event for event in (Question, Piece, Answer, Done)}


@dataclass
class Turn:
    """A question with its answers so far. `partial`: answers that are being generated."""

    question: Question
    answers: dict[Model, Answer] = field(default_factory=dict)
    partial: dict[Model, Piece] = field(default_factory=dict)
    done: Done | None = None

    def add(self, event: Piece | Answer | Done) -> None:
        match event:
            case Piece():
                before = self.partial.get(event.model, Piece(id=event.id, model=event.model, text=""))
                text, thought = before.text + event.text, before.thought + event.thought
                self.partial[event.model] = Piece(id=event.id, model=event.model, text=text, thought=thought)
            case Answer():
                self.answers[event.model] = event
                self.partial.pop(event.model, None)
            case Done():
                self.done = event


class Chats:
    """Keeps one process with a run's models: a question to another run ends it."""

    def __init__(self, workspace: Workspace) -> None:
        self._workspace, self._folder = workspace, workspace.folder("chat")
        self._lock = threading.Lock()
        self._process: subprocess.Popen[str] | None = None
        self._name = ""

    def ask(self, run: RunDirectory, question: str, max_new_tokens: int, **how: Any) -> None:
        """Send a question; returns at once. The answers appear in `turns` as they are made.

        `how`: `models`, `system`, `pictures`, `temperature`, `top_p` and `seed`, where they are not the usual ones.
        """
        with self._lock:
            self._send(self._process_of(run), {"question": question, "max_new_tokens": max_new_tokens, **how})

    def stop(self, run: RunDirectory) -> None:
        """End the answers that are being generated; their text so far stays."""
        with self._lock:
            if self._process is not None and self.is_running(run):
                self._send(self._process, {"stop": True})

    def turns(self, run: RunDirectory) -> list[Turn]:
        """The turns so far, oldest first."""
        turns: dict[str, Turn] = {}
        for event in read_events(self.path(run), KINDS):
            if isinstance(event, Question):
                turns[event.id] = Turn(event)
            elif isinstance(event, (Piece, Answer, Done)) and event.id in turns:
                turns[event.id].add(event)
        return list(turns.values())

    def clear(self, run: RunDirectory) -> None:
        """Start a new conversation; the old file is kept under a name that ends in .old."""
        with self._lock:
            self._end()
            if self.path(run).exists():
                self.path(run).rename(self._folder / f"{run.path.name}-{time.time_ns()}.old")

    def path(self, run: RunDirectory) -> Path:
        """The file of this run's conversation."""
        return self._folder / f"{run.path.name}.jsonl"

    @property
    def pictures(self) -> Path:
        return self._folder / PICTURES

    def is_running(self, run: RunDirectory) -> bool:
        return self._name == run.path.name and self._process is not None and self._process.poll() is None

    def close(self) -> None:
        with self._lock:
            self._end()

    @staticmethod
    def _send(process: subprocess.Popen[str], message: dict[str, Any]) -> None:
        assert process.stdin is not None
        process.stdin.write(json.dumps(message) + "\n")
        process.stdin.flush()

    def _process_of(self, run: RunDirectory) -> subprocess.Popen[str]:
        if self._process is None or self._process.poll() is not None or self._name != run.path.name:
            self._end()
            log = self._folder / "log.txt"
            self._process = start_helper(self._workspace, ".chat.process", str(run.path), str(self.path(run)), log=log)
            self._name = run.path.name
        return self._process

    def _end(self) -> None:
        if self._process is not None:
            self._process.kill()
            self._process.wait()
            self._process = None
