"""Answers of models side by side: `python -m app.chat.process RUN FILE`, questions as JSON on standard input.

Ends when the app ends, or after IDLE_S without a question, so that its memory is free for training.
"""

from __future__ import annotations

import contextlib
import json
import queue
import sys
import threading
import time
import uuid
from collections.abc import Callable, Collection, Sequence
from pathlib import Path
from typing import Any

from finetune.data.pictures.placement import message_with_pictures
from finetune.data.pictures.source import PictureSource
from finetune.errors import CommandError, FinetuneError
from finetune.events import EventWriter, read_events
from finetune.gc_settings import raise_gc_thresholds
from finetune.planner.plan import read_plan
from finetune.privacy import keep_private
from finetune.run.directory import RunDirectory

from ..process import redirect_stdout
from .chats import IDLE_S, KINDS, MODELS, Answer, Done, Failure, Model, Piece, Question, pictures_beside
from .pictures import kept_pictures

#: Seconds between two pieces of an answer in the file.
_PIECE_S = 0.2


def main() -> int:
    """Load the model at the first question, answer until idle."""
    run, path = RunDirectory(Path(sys.argv[1])), Path(sys.argv[2])
    keep_private()
    raise_gc_thresholds()
    redirect_stdout()
    writer, chat, requests = EventWriter(path), Conversation(run, path), RequestReader()
    while message := requests.next():
        identity = uuid.uuid4().hex
        models = tuple(dict.fromkeys(message.get("models", MODELS)))
        pictures = tuple(message.get("pictures", ()))
        writer.emit(Question(id=identity, text=message["question"], models=models, pictures=pictures))
        try:
            chat.answer(message, writer, identity, requests.is_stopped)
            writer.emit(Done(id=identity))
        except FinetuneError as error:
            writer.emit(Failure(id=identity, text=" ".join([*error.problems, error.fix])))
        except Exception as error:  # noqa: BLE001 - the page must say why there is no answer
            import traceback

            traceback.print_exc()
            writer.emit(Failure(id=identity, text=f"{type(error).__name__}: {error}"))
    return 0


class RequestReader:
    """Questions from standard input, read by a thread, so that a stop arrives while an answer is made."""

    def __init__(self) -> None:
        self._questions: queue.Queue[dict[str, Any] | None] = queue.Queue()
        self._stop = threading.Event()
        threading.Thread(target=self._read, daemon=True).start()

    def next(self) -> dict[str, Any] | None:
        """The next question; None at the end of the app, or after IDLE_S without one."""
        try:
            message = self._questions.get(timeout=IDLE_S)
        except queue.Empty:
            return None
        if message is not None:
            self._stop.clear()
        return message

    def is_stopped(self) -> bool:
        """Whether the answers to the present question shall end."""
        return self._stop.is_set()

    def _read(self) -> None:
        for line in sys.stdin:
            message = json.loads(line)
            if message.get("stop"):
                self._stop.set()
            else:
                self._questions.put(message)
        self._stop.set()
        self._questions.put(None)


class LoadedModels:
    """The answerers of runs. Runs of one base share it; another base is loaded beside it only where its memory is free."""

    def __init__(self, free_bytes: Callable[[str], int] | None = None) -> None:
        self._free_bytes = free_bytes or free_memory
        self._answerers: dict[str, Any] = {}

    def of(self, run: RunDirectory, names: Collection[str]) -> tuple[Any, bool]:
        """The run's answerer, and whether one of `names`, all that a question needs, had to go for it.

        Raises CommandError where it can't be loaded.
        """
        from finetune.evaluate.answerer import Answerer

        name = run.path.name
        if name in self._answerers:
            return self._answerers[name], False
        if shared := self._sharing_base(run):
            self._answerers[name] = shared
            return shared, False
        is_alone = self._unload_for(run, names)
        self._answerers[name] = Answerer(run)
        return self._answerers[name], is_alone

    def _unload_for(self, run: RunDirectory, names: Collection[str]) -> bool:
        """Unload bases until there is memory for the run, first those that no one of `names` needs; whether one is needed."""
        is_needed = False
        while self._answerers and not self._has_memory_for(run):
            bases: dict[int, set[str]] = {}
            for name, answerer in self._answerers.items():
                bases.setdefault(id(answerer.model), set()).add(name)
            unloaded = min(bases.values(), key=lambda runs: not runs.isdisjoint(names))
            is_needed |= not unloaded.isdisjoint(names)
            for name in unloaded:
                del self._answerers[name]
            del answerer  # the loop's, which would keep the model
            release_memory()
        return is_needed

    def _sharing_base(self, run: RunDirectory) -> Any:
        for answerer in self._answerers.values():
            with contextlib.suppress(CommandError):
                return answerer.sharing_base(run)
        return None

    def _has_memory_for(self, run: RunDirectory) -> bool:
        """Whether the forecast of loading it fits into what is free now; an unknown forecast does not."""
        plan = read_plan(run.plan)
        if plan.forecast is None:
            return False
        needed_bytes = plan.forecast.peaks.get("load", plan.forecast.parts.get("weights", 0))
        return needed_bytes <= self._free_bytes("cpu" if plan.card.is_cpu else "cuda")


def free_memory(device: str) -> int:
    """Bytes free now on the GPU, or of the host's memory."""
    if device == "cuda":
        import torch

        return int(torch.cuda.mem_get_info()[0])
    import psutil

    return int(psutil.virtual_memory().available)


def release_memory() -> None:
    """Give back what models that are no longer used have taken."""
    import gc

    import torch

    gc.collect()
    if torch.cuda.is_initialized():
        torch.cuda.empty_cache()


class Conversation:
    """One message history for each model, with that model's own answers. `run`: the one whose `base` and `tuned` answer."""

    def __init__(self, run: RunDirectory, path: Path, loaded: LoadedModels | None = None) -> None:
        self._run, self._loaded = run, loaded or LoadedModels()
        self._messages: dict[str, list[dict[str, Any]]] = {model: [] for model in MODELS}
        self._pictures: dict[str, list[PictureSource]] = {}
        self._folder = pictures_beside(path)
        self._restore(path)

    def answer(self, request: dict[str, Any], writer: EventWriter, identity: str, stopped: Callable[[], bool]) -> None:
        """The answers, written as they are made, each from the same seed; once stopped, the rest is left out."""
        models = list(dict.fromkeys(request.get("models", MODELS)))
        names = {self._run_of(model).path.name for model in models}
        for model in models:
            if not stopped():
                writer.emit(self._answer(model, names, request, _Pieces(writer, identity, model), stopped))

    def _run_of(self, model: Model) -> RunDirectory:
        name = model.partition("/")[2]
        return RunDirectory(self._run.path.with_name(name)) if name else self._run

    def _answer(
        self, model: Model, names: Collection[str], request: dict[str, Any], pieces: _Pieces, stopped: Callable[[], bool]
    ) -> Answer:
        """One model's answer. Nothing but `_loaded` has a model for longer: it could not be released for the next."""
        from finetune.model.generate import Sampling

        answerer, is_alone = self._loaded.of(self._run_of(model), names)
        sampling = Sampling(float(request.get("temperature", 0)), float(request.get("top_p", 1)), int(request.get("seed", 0)))
        system = [{"role": "system", "content": request["system"]}] if request.get("system") else []
        asked_with = request.get("pictures", ())
        added = kept_pictures(self._folder, asked_with)
        if len(added) < len(asked_with):
            raise CommandError("a picture of this message is gone or was changed", "Add it again.")
        messages = [*self._messages.get(model, []), message_with_pictures(request["question"], len(added))]
        if pictures := [*self._pictures.get(model, []), *added]:
            answerer.require_vision()
        reader = answerer.reader
        with answerer.using(model.partition("/")[0]):
            reply = answerer.stream(
                answerer.prompt_ids([*system, *messages], pictures=pictures), pictures=pictures,
                max_new_tokens=int(request["max_new_tokens"]),
                sampling=sampling, say=lambda piece: pieces.add(reader.without_special_tokens(piece) if reader else piece),
                stopped=stopped, with_calls=reader is not None,
            )  # fmt: skip
        read = reader.read(reply.text) if reader else None
        text = read.text if read else reply.text
        calls = tuple(call["function"] for call in read.calls) if read else ()
        self._messages[model], self._pictures[model] = [*messages, _assistant(text, calls)], pictures
        return Answer(
            id=pieces.identity, model=model, text=text, tokens=reply.tokens, tokens_per_s=reply.tokens_per_s,
            stopped=reply.stopped, calls=calls, alone=is_alone,
        )  # fmt: skip

    def _restore(self, path: Path) -> None:
        events = read_events(path, KINDS)
        questions = {event.id: event for event in events if isinstance(event, Question)}
        for event in events:
            if isinstance(event, Answer) and event.id in questions:
                question = questions[event.id]
                pictures = kept_pictures(self._folder, question.pictures)
                pair = [message_with_pictures(question.text, len(pictures)), _assistant(event.text, event.calls)]
                self._messages.setdefault(event.model, []).extend(pair)
                self._pictures.setdefault(event.model, []).extend(pictures)


def _assistant(text: str, calls: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """An answer as the message that templates write."""
    message: dict[str, Any] = {"role": "assistant", "content": text}
    return {**message, "tool_calls": [{"type": "function", "function": call} for call in calls]} if calls else message


class _Pieces:
    """Writes an answer's pieces, a few times a second."""

    def __init__(self, writer: EventWriter, identity: str, model: Model) -> None:
        self._writer, self.identity, self._model = writer, identity, model
        self._waiting, self._written = "", time.monotonic()

    def add(self, text: str) -> None:
        """Write the text with the pieces that wait, unless something was written just now."""
        self._waiting += text
        now = time.monotonic()
        if now - self._written >= _PIECE_S:
            self._writer.emit(Piece(id=self.identity, model=self._model, text=self._waiting))
            self._waiting, self._written = "", now


if __name__ == "__main__":
    sys.exit(main())
