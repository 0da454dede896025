"""Conversations with models of runs: a separate process generates, a file has the messages.

The page writes a question to RUNS/.app/chat/<run>.jsonl, and the process its answers; every tab reads the same file, and
closing a tab loses nothing.
"""

from __future__ import annotations

import threading
import time
import uuid
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from finetune.errors import FinetuneError
from finetune.events import Event, EventWriter, event_json, read_events
from finetune.run.directory import RunDirectory

from ..worker import SupersededError, Worker
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
        self._worker: Worker | None = None
        self._name = ""
        self._asking = ThreadPoolExecutor(1)  # questions are answered in their order
        self._newest: Future[None] | None = None

    def ask(
        self, run: RunDirectory, text: str, max_new_tokens: int, *, models: Sequence[Model] = MODELS,
        pictures: Sequence[str] = (), **how: Any,
    ) -> None:  # fmt: skip
        """Ask a question, without waiting. The answers appear in `turns` while they are made.

        `how`: `system`, `temperature`, `top_p` and `seed`, where they are not the usual ones.
        """
        question = Question(id=uuid.uuid4().hex, text=text, models=tuple(models), pictures=tuple(pictures))
        with self._lock:
            worker = self._worker_of(run)
        EventWriter(self.path(run)).emit(question)
        self._newest = self._asking.submit(self._wait, worker, run, question, {"max_new_tokens": max_new_tokens, **how})

    def _wait(self, worker: Worker, run: RunDirectory, question: Question, how: dict[str, Any]) -> None:
        error = ""
        try:
            worker.call("answer", question=event_json(question), **how)
        except FinetuneError as failure:
            error = " ".join([*failure.problems, failure.fix])
        except SupersededError:
            pass
        if self.path(run).exists():
            EventWriter(self.path(run)).emit(Done(id=question.id, error=error))

    def stop(self, run: RunDirectory) -> None:
        """End the answers that are being generated; their text so far stays."""
        if self._worker is not None and self.is_running(run):
            self._worker.cancel("answer")

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
        if self.path(run).exists():
            self.path(run).rename(self._folder / f"{run.path.name}-{time.time_ns()}.old")
        self.close()

    def path(self, run: RunDirectory) -> Path:
        """The file of this run's conversation."""
        return self._folder / f"{run.path.name}.jsonl"

    @property
    def pictures(self) -> Path:
        return self._folder / PICTURES

    def is_answering(self, run: RunDirectory) -> bool:
        """Whether a question is being answered."""
        return self._name == run.path.name and self._newest is not None and not self._newest.done()

    def is_running(self, run: RunDirectory) -> bool:
        """Whether the process has the run's models in memory."""
        return self._name == run.path.name and self._worker is not None and self._worker.is_alive

    def close(self) -> None:
        """End the process."""
        with self._lock:
            if self._worker is not None:
                self._worker.close()
                self._worker = None

    def _worker_of(self, run: RunDirectory) -> Worker:
        if self._worker is None or self._name != run.path.name:
            if self._worker is not None:
                self._worker.close()
            arguments, log = (str(run.path), str(self.path(run))), self._folder / "log.txt"
            self._worker = Worker(self._workspace, ".chat.process", *arguments, log=log, tries=1)
            self._name = run.path.name
        return self._worker
