"""`finetune chat`: questions in the terminal, answered by the base model, by runs of it, or by both."""

from __future__ import annotations

import contextlib
import signal
import sys
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.markup import escape

from finetune.cli.chat_tools import Tools, answer_turns, ask_for_replies, print_calls, read_tools_file, require_calls
from finetune.cli.output import print_json
from finetune.cli.render import err, out, show_progress
from finetune.data.pictures.source import BadPicture, PictureSource, picture_file
from finetune.errors import CommandError
from finetune.planner.plan import read_plan
from finetune.printable import printable
from finetune.run.card import restrict_visible_devices
from finetune.run.directory import RunDirectory, open_run

if TYPE_CHECKING:
    from finetune.data.call_syntax import Answer
    from finetune.evaluate.answerer import Answerer
    from finetune.model.generate import Sampling, Streamed


def chat_command(runs: list[str], *, base: bool, both: bool, **options: Any) -> None:
    """Chat with the tuned models of runs, with their base, or with `both`."""
    source, *others = runs
    chat_with(source, others=others, models=("base", "tuned") if both else ("base",) if base else ("tuned",), **options)


def chat_with(
    source: str, *, models: tuple[str, ...], prompt: str | None, system: str | None, max_new_tokens: int,
    temperature: float, top_p: float, seed: int, as_json: bool, others: Sequence[str] = (), tools_file: str | None = None,
) -> None:  # fmt: skip
    """Answer `prompt`, or chat until Ctrl-D or `exit`, with each of `models` (base, tuned) from the same seed.

    The runs of `others` share the base model: all answer the prompt; in a chat the first does until `/use NAME`.
    `tools_file`: JSON with the tools that the models may call; the user types what they answer.
    """
    tools = read_tools_file(tools_file)
    if prompt is not None and not prompt.strip():
        raise CommandError("--prompt is empty", "Give a prompt, or leave the option out to chat.")
    runs = [open_run(source) for source in dict.fromkeys([source, *others])]
    if len({run.path.name for run in runs}) < len(runs):
        raise CommandError("two of these runs have the same name", "Rename one: finetune runs rename RUN NAME")
    answerers = _loaded(runs, models, tools, max_new_tokens, as_json=as_json)
    from finetune.model.generate import Sampling

    chat = _Chat(
        answerers, models, tools, Sampling(temperature, top_p, seed), max_new_tokens, system, as_json=as_json,
        is_interactive=prompt is None, answering=list(answerers),
    )  # fmt: skip
    if prompt is not None:
        chat.ask(prompt)
        return
    chat.answering = chat.answering[:1]
    if len(runs) > 1 and not as_json:
        first, *silent = map(escape, answerers)
        err.print(f"[dim]{first} answers; /use {' or /use '.join(silent)} changes that[/]")
    for line in _questions():
        chat.obey(line)


def _loaded(
    runs: list[RunDirectory], models: tuple[str, ...], tools: Tools, max_new_tokens: int, *, as_json: bool
) -> dict[str, Answerer]:
    """The runs' models by name, on one base model, and what a person must know of them before the first question."""
    with show_progress(quiet=as_json) as progress:
        progress("loading the model")
        restrict_visible_devices(runs[0])
        from finetune.evaluate.answerer import Answerer
        from finetune.evaluate.kv_cache import chat_memory

        if not as_json:
            memory = chat_memory(read_plan(runs[0].plan), max_new_tokens)
            err.print(f"[{'dim' if memory.fits else 'yellow'}]{memory.summary()}[/]")
        first = Answerer(runs[0], need_adapter="tuned" in models or len(runs) > 1)
        answerers = {runs[0].path.name: first, **{other.path.name: first.sharing_base(other) for other in runs[1:]}}
        if tools:
            for answerer in answerers.values():
                require_calls(answerer)
    if first.plan.layer_copies and not as_json:
        err.print(f"[dim]{first.plan.layer_copies.generation_summary}[/]")
    if first.plain and not as_json:
        err.print("[dim]trained on prompts without the chat template: each message is sent as it is, without those before[/]")
    return answerers


@dataclass
class _Chat:
    """A conversation with each run and model that answered in it. `answering`: the runs whose tuned models answer."""

    answerers: dict[str, Answerer]
    models: tuple[str, ...]
    tools: Tools
    sampling: Sampling
    max_new_tokens: int
    system: str | None
    as_json: bool
    is_interactive: bool
    answering: list[str]
    #: That go with the next message.
    pictures: list[PictureSource] = field(default_factory=list)
    #: By run and model: the messages, and the pictures in them.
    turns: dict[tuple[str, str], list[dict[str, Any]]] = field(default_factory=dict)
    sent: dict[tuple[str, str], list[PictureSource]] = field(default_factory=dict)

    def obey(self, line: str) -> None:
        """A line of the user: a command of the chat, else a question."""
        command = line.split()[0]
        if command == "/use":
            self.answering = _switch_run(line, self.answering, self.answerers, self.as_json)
        elif command == "/image":
            self._add_picture(Path(line.removeprefix("/image").strip()).expanduser())
        else:
            self.ask(line)

    def ask(self, question: str) -> None:
        from finetune.data.pictures.placement import message_with_pictures

        added, self.pictures = self.pictures, []
        asked = [
            (name, model) for model in self.models for name in (self.answering if model == "tuned" else self.answering[:1])
        ]
        for name, model in asked:
            turns = self.turns.setdefault((name, model), self._start())
            turns.append(message_with_pictures(question, len(added)))
            self.sent[name, model] = [*self.sent.get((name, model), ()), *added]
            if len(asked) > 1 and not self.as_json:
                out.print(f"[bold]{escape(name) if len(self.answerers) > 1 and model == 'tuned' else model}[/]")
            while self._answer(name, model, question):
                pass  # the user typed what the called tools answer

    def _start(self) -> list[dict[str, Any]]:
        return [{"role": "system", "content": self.system}] if self.system else []

    def _answer(self, name: str, model: str, question: str) -> bool:
        """Print an answer to the turns so far; whether it is to go on, with replies to its calls of tools."""
        answerer, turns = self.answerers[name], self.turns[name, model]
        with answerer.using(model), _stop_on_ctrl_c() as stopped:
            reply, answer = answer_turns(
                answerer, turns, self.tools, (lambda _: None) if self.as_json else _print_piece, self.sent[name, model],
                max_new_tokens=self.max_new_tokens, sampling=self.sampling, stopped=stopped,
            )  # fmt: skip
        if self.as_json:
            calls = {"calls": answer.calls} if self.tools else {}
            print_json({
                "run": str(answerer.run.path), "model": model, "prompt": question, "answer": answer.text, **calls,
                "tokens": reply.tokens, "tokens_per_s": reply.tokens_per_s, "stopped": reply.stopped,
            })  # fmt: skip
        else:
            _print_end(reply, answer)
            if not self.is_interactive and reply.stopped:
                raise KeyboardInterrupt
        return self.is_interactive and ask_for_replies(answer, turns)

    def _add_picture(self, path: Path) -> None:
        """Add the picture of `/image PATH`; a file that is no picture is said, and the chat goes on."""
        try:
            next(iter(self.answerers.values())).require_vision()
            picture = picture_file(path)
            self.pictures.append(picture)
            note = f"{path.name}, {picture.width:,} x {picture.height:,} pixels, goes with the next message"
        except BadPicture as error:
            note = f"{path} {error} Give a picture's file:  /image PATH"
        except CommandError as error:
            note = " ".join([*error.problems, error.fix]).strip()
        if not self.as_json:
            err.print(f"[dim]{escape(note)}[/]")


def _switch_run(question: str, used: list[str], names: Collection[str], as_json: bool) -> list[str]:
    """The run that `/use NAME` selects for the next answers."""
    name = question.partition("/use")[2].strip()
    if name in names:
        used = [name]
    if not as_json:
        unknown = "" if name in names or not name else f"there is no {escape(name)} in this chat; "
        err.print(f"[dim]{unknown}{escape(used[0])} answers, of {escape(', '.join(names))}[/]")
    return used


def _print_piece(piece: str) -> None:
    print(printable(piece), end="", flush=True)


def _print_end(reply: Streamed, answer: Answer) -> None:
    """What stands below a streamed answer: its calls, and how fast it was."""
    print(end="\n" if answer.text or not answer.calls else "")
    print_calls(answer)
    rate = f", {reply.tokens_per_s:.1f} tokens/s" if reply.tokens_per_s else ""
    err.print(f"[dim]{reply.tokens:,} tokens{rate}{', stopped' if reply.stopped else ''}[/]")


@contextlib.contextmanager
def _stop_on_ctrl_c() -> Iterator[Callable[[], bool]]:
    """Yields whether Ctrl-C was pressed: it stops this answer, a second one the command."""
    pressed: list[bool] = []

    def press(*_: Any) -> None:
        if pressed:
            raise KeyboardInterrupt
        pressed.append(True)

    before = signal.signal(signal.SIGINT, press)
    try:
        yield lambda: bool(pressed)
    finally:
        signal.signal(signal.SIGINT, before)


def _questions() -> Any:
    """Lines from standard input until Ctrl-D, `exit` or `/exit`."""
    if sys.stdin is None:  # closed by whoever started this
        return
    sys.stdin.reconfigure(errors="replace")  # type: ignore[union-attr]
    if sys.stdin.isatty():
        out.print("[dim]exit, or Ctrl-D, ends the chat[/]")
    while True:
        try:
            question = input("you> " if sys.stdin.isatty() else "")
        except EOFError:
            return
        if question.strip().lower() in ("exit", "/exit", "quit", "/quit", "/bye"):
            return
        if question.strip():
            yield question
