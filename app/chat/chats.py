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
from typing import Any, ClassVar

from finetune.events import Event, read_events
from finetune.run.directory import RunDirectory

from ..language import tr
from ..process import start_helper
from ..workspace import Workspace

#: The conversation of the page Chat, which belongs to no run: the name of a folder that is none.
COMPARISON = ".comparison"
#: After this long without a question the chat process ends and frees its memory.
IDLE_S = 600.0
#: Who answers: `base` or `tuned` of the run that the conversation belongs to, or of another one, such as `tuned/RUN`.
Model = str
MODELS: tuple[Model, ...] = ("base", "tuned")


@dataclass(frozen=True, kw_only=True)
class Question(Event):
    """A question of the page."""

    kind: ClassVar[str] = "question"

    id: str
    text: str
    models: tuple[Model, ...] = MODELS
    #: Names of its files.
    pictures: tuple[str, ...] = ()


@dataclass(frozen=True, kw_only=True)
class Piece(Event):
    """The next piece of an answer that is being generated."""

    kind: ClassVar[str] = "piece"

    id: str
    model: Model
    text: str


@dataclass(frozen=True, kw_only=True)
class Answer(Event):
    """The whole answer of a model to the question of that id, its calls of tools, how fast it was, and whether it was stopped.

    `alone`: the model was loaded in place of the other one, as both may not fit.
    """

    kind: ClassVar[str] = "answer"

    id: str
    model: Model
    text: str
    tokens: int | None = None
    tokens_per_s: float | None = None
    stopped: bool = False
    calls: tuple[dict[str, Any], ...] = ()
    alone: bool = False


@dataclass(frozen=True, kw_only=True)
class Failure(Event):
    """Why there is no answer, or only one."""

    kind: ClassVar[str] = "error"

    id: str
    text: str


@dataclass(frozen=True, kw_only=True)
class Done(Event):
    """All that were asked have answered."""

    kind: ClassVar[str] = "done"

    id: str


KINDS: dict[str, type[Event]] = {event.kind: event for event in (Question, Piece, Answer, Failure, Done)}


@dataclass
class Turn:
    """A question with the answers as far as they are, or why there is none."""

    question: str
    answers: dict[Model, str] = field(default_factory=dict)
    error: str | None = None
    done: bool = False
    models: tuple[Model, ...] = MODELS
    partial: dict[Model, str] = field(default_factory=dict)
    notes: dict[Model, str] = field(default_factory=dict)
    calls: dict[Model, tuple[dict[str, Any], ...]] = field(default_factory=dict)
    pictures: tuple[str, ...] = ()

    def add(self, event: Piece | Answer | Failure | Done) -> None:
        """Add an event to the turn; an answer that nobody asked for is left out."""
        if isinstance(event, (Piece, Answer)) and event.model not in self.models:
            return
        match event:
            case Piece():
                self.partial[event.model] = self.partial.get(event.model, "") + event.text
            case Answer():
                self.answers[event.model] = event.text
                self.partial.pop(event.model, None)
                if event.calls:
                    self.calls[event.model] = event.calls
                if event.tokens is not None:
                    self.notes[event.model] = _note(event)
            case Failure():
                self.error, self.done = event.text, True
            case Done():
                self.done = True


def _note(answer: Answer) -> str:
    """How long an answer is and how fast it came, in the language of the request that shows it."""
    parts = [tr("{n} tokens", n=f"{answer.tokens:,}")]
    if answer.tokens_per_s:
        parts.append(tr("{rate} tokens/s", rate=f"{answer.tokens_per_s:.1f}"))
    if answer.stopped:
        parts.append(tr("stopped"))
    if answer.alone:
        parts.append(tr("loaded in turn: both may not fit"))
    return ", ".join(parts)


def pictures_beside(path: Path) -> Path:
    """The folder of the pictures of a conversation's file."""
    return path.with_name("pictures")


class Chats:
    """Keeps one process with models: a question in another conversation ends the previous one's.

    A conversation is named by its run, or by the folder COMPARISON beside the runs.
    """

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
                turns[event.id] = Turn(event.text, models=event.models, pictures=event.pictures)
            elif isinstance(event, (Piece, Answer, Failure, Done)) and event.id in turns:
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
        """The folder of the pictures of all conversations."""
        return pictures_beside(self._folder / "any")

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
