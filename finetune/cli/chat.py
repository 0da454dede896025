"""`finetune chat`."""

from __future__ import annotations

import contextlib
import signal
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.markup import escape

from finetune.cli.output import print_json
from finetune.cli.render import err, out, show_progress
from finetune.data.pictures.source import BadPicture, PictureSource, picture_file
from finetune.data.tool_calls import Answer, assistant_message, display_text
from finetune.errors import CommandError
from finetune.run.card import restrict_visible_devices
from finetune.run.directory import RunDirectory, open_run
from finetune.units import printable

if TYPE_CHECKING:
    from finetune.evaluate.answerer import Answerer
    from finetune.model.generate import Sampling

Tools = tuple[dict[str, Any], ...]


def chat_command(
    source: str, *, base: bool, both: bool, prompt: str | None, system: str | None, max_new_tokens: int,
    temperature: float, top_p: float, seed: int, as_json: bool, tools_file: str | None = None,
) -> None:  # fmt: skip
    """Answer `prompt`, or chat until Ctrl-D or `exit`."""
    models = ("base", "tuned") if both else ("base",) if base else ("tuned",)
    tools = read_tools_file(tools_file)
    if prompt is not None and not prompt.strip():
        raise CommandError("--prompt is empty", "Give a prompt, or leave the option out to chat.")
    answerer = _load_answerer(open_run(source), models, tools, as_json=as_json)
    from finetune.model.generate import Sampling

    sampling = Sampling(temperature, top_p, seed)  # the same seed for both models: only their weights differ
    chat = _Chat(answerer, models, tools, sampling, max_new_tokens, system, as_json, is_interactive=prompt is None)
    if prompt is not None:
        chat.ask(prompt)
        return
    for line in _typed_questions():
        if line.split()[0] == "/image":
            chat.add_picture(Path(line.removeprefix("/image").strip()).expanduser())
        else:
            chat.ask(line)


def read_tools_file(path: str | None) -> Tools:
    """Read tools from a JSON file; none without a path. Raises CommandError."""
    from finetune.data.checks import BadRow
    from finetune.data.tool_calls import read_tools
    from finetune.files import parse_json

    if path is None:
        return ()
    try:
        return read_tools(parse_json(Path(path).read_bytes()), "tools")
    except OSError as error:
        raise CommandError(f"{path} can't be read: {error.strerror}", "Give a JSON file with a list of tools.") from None
    except (ValueError, BadRow) as error:
        reason = f"it {error.reason}" if isinstance(error, BadRow) else "it is not JSON"
        raise CommandError(f"{path} is not a list of tools: {reason}", "Write them as in a dataset's `tools` column.") from None


def _load_answerer(run: RunDirectory, models: tuple[str, ...], tools: Tools, *, as_json: bool) -> Answerer:
    with show_progress(quiet=as_json) as progress:
        progress("loading the model")
        restrict_visible_devices(run)  # before the imports: importing bitsandbytes opens CUDA
        from finetune.evaluate.answerer import Answerer

        answerer = Answerer(run, need_adapter="tuned" in models)
        if tools and not (answerer.chat_format and answerer.chat_format.syntax):
            raise CommandError(
                f"the chat template of {run.path.name} does not support tool calls",
                "Leave out --tools, or train with a chat_template that supports tools.",
            )
    if answerer.plan.layer_copies and not as_json:
        err.print(f"[dim]{answerer.plan.layer_copies.generation_summary}[/]")
    if answerer.plain and not as_json:
        err.print("[dim]trained on prompts without the chat template: each message is sent alone, without earlier messages[/]")
    return answerer


@dataclass
class _Chat:
    answerer: Answerer
    models: tuple[str, ...]
    tools: Tools
    sampling: Sampling
    max_new_tokens: int
    system: str | None
    as_json: bool
    is_interactive: bool
    pictures: list[PictureSource] = field(default_factory=list)  # sent with the next message
    sent_pictures: list[PictureSource] = field(default_factory=list)  # sent so far, in order
    #: Messages by model: a model continues only from answers that it wrote.
    turns: dict[str, list[dict[str, Any]]] = field(default_factory=dict)

    def ask(self, question: str) -> None:
        from finetune.data.pictures.placement import message_with_pictures

        message = message_with_pictures(question, len(self.pictures))
        self.sent_pictures = [*self.sent_pictures, *self.pictures]
        self.pictures = []
        for model in self.models:
            turns = self.turns.setdefault(model, [{"role": "system", "content": self.system}] if self.system else [])
            turns.append(message)
            if len(self.models) > 1 and not self.as_json:
                out.print(f"[bold]{model}[/]")
            self._answer(model, question, turns)

    def _answer(self, model: str, question: str, turns: list[dict[str, Any]]) -> None:
        was_thought = False

        def show(piece: str, is_thought: bool) -> None:
            nonlocal was_thought
            if self.as_json:
                return
            if was_thought and not is_thought:
                print("\n")
            was_thought = is_thought
            text = escape(printable(piece))  # a model may write escape sequences
            out.print(f"[dim]{text}[/]" if is_thought else text, end="", soft_wrap=True, highlight=False)

        with self.answerer.using(model), _stop_on_ctrl_c() as stopped:
            reply, answer = self.answerer.stream(
                turns, show, tools=self.tools or None, pictures=self.sent_pictures,
                max_new_tokens=self.max_new_tokens, sampling=self.sampling, stopped=stopped,
            )  # fmt: skip
        turns.append(assistant_message(answer))
        if self.as_json:
            calls = {"calls": answer.calls} if self.tools else {}
            print_json({
                "run": str(self.answerer.run.path), "model": model, "prompt": question, "thought": answer.thought,
                "answer": answer.text, **calls,
                "tokens": reply.tokens, "tokens_per_s": reply.tokens_per_s, "stopped": reply.stopped,
            })  # fmt: skip
            return
        if answer.text or not answer.calls:
            print()
        for call in answer.calls:
            out.print(f"[bold]calls[/] {escape(printable(display_text(Answer('', [call]))))}", soft_wrap=True)
        if answer.is_unreadable:
            err.print("[yellow]this looks like a tool call, but can't be parsed[/]")
        rate = f", {reply.tokens_per_s:.1f} tokens/s" if reply.tokens_per_s else ""
        err.print(f"[dim]{reply.tokens:,} tokens{rate}{', stopped' if reply.stopped else ''}[/]")
        if reply.stopped and not self.is_interactive:
            raise KeyboardInterrupt  # the exit code of an interrupted command

    def add_picture(self, path: Path) -> None:
        try:
            self.answerer.require_vision()
            picture = picture_file(path)
            self.pictures.append(picture)
            note = f"{path.name}, {picture.width:,} x {picture.height:,} pixels, will be sent with the next message"
        except BadPicture as error:
            note = f"{path} {error} Give an image file:  /image PATH"
        except CommandError as error:  # shown as a note: the chat continues
            note = " ".join([*error.problems, error.fix]).strip()
        if not self.as_json:
            err.print(f"[dim]{escape(note)}[/]")


@contextlib.contextmanager
def _stop_on_ctrl_c() -> Iterator[Callable[[], bool]]:
    pressed: list[bool] = []

    def press(*_: Any) -> None:
        if pressed:  # the second Ctrl-C ends the command
            raise KeyboardInterrupt
        pressed.append(True)

    previous_handler = signal.signal(signal.SIGINT, press)
    try:
        yield lambda: bool(pressed)
    finally:
        signal.signal(signal.SIGINT, previous_handler)


def _typed_questions() -> Any:
    if sys.stdin is None:  # closed by the parent process
        return
    # pasted bytes that are not UTF-8 must not end the chat
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
