"""Tools in `finetune chat`: their file, the model's calls as people read them, and the replies that the user types."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.markup import escape

from finetune.cli.render import err, out
from finetune.data.call_syntax import Answer, display_text
from finetune.errors import CommandError
from finetune.printable import printable

if TYPE_CHECKING:
    from finetune.data.pictures.source import PictureSource
    from finetune.evaluate.answerer import Answerer
    from finetune.model.generate import Streamed

Tools = tuple[dict[str, Any], ...]


def read_tools_file(path: str | None) -> Tools:
    """The tools in a JSON file, as in the rows of a dataset. Raises CommandError."""
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
        raise CommandError(f"{path} is no list of tools: {reason}", "Write them as in the rows' tools.") from None


def require_calls(answerer: Answerer) -> None:
    """Raises CommandError for a model that writes no calls."""
    if answerer.reader is None:
        raise CommandError(
            f"the chat template of {answerer.run.path.name} writes no calls of tools",
            "Leave out --tools, or train with a chat_template that has tools.",
        )


def answer_turns(
    answerer: Answerer, turns: list[dict[str, Any]], tools: Tools, say: Callable[[str], None],
    pictures: Sequence[PictureSource] = (), **options: Any,
) -> tuple[Streamed, Answer]:  # fmt: skip
    """The answer to `turns`, which is appended to them, with its calls if there are tools. `pictures`: those of all turns."""
    from finetune.evaluate.call_stream import CallStream

    reader = answerer.reader if tools else None
    if reader is None:
        reply = answerer.stream(answerer.prompt_ids(turns, (), pictures), say=say, pictures=pictures, **options)
        turns.append({"role": "assistant", "content": reply.text})
        return reply, Answer(reply.text)
    call_stream = CallStream(reader, tools, say)
    prompt_ids = answerer.prompt_ids(turns, tools, pictures)
    reply = answerer.stream(prompt_ids, say=call_stream.add, with_calls=True, pictures=pictures, **options)
    answer = call_stream.finish()
    calls = {"tool_calls": answer.calls} if answer.calls else {}
    turns.append({"role": "assistant", "content": answer.text, **calls})
    return reply, answer


def print_calls(answer: Answer) -> None:
    """Each call on a line; a call that can't be read is named as such."""
    for call in answer.calls:
        out.print(f"[bold]calls[/] {escape(printable(display_text(Answer('', [call]))))}", soft_wrap=True)
    if answer.is_unreadable:
        err.print("[yellow]this begins like a call, but can't be read as one[/]")


def ask_for_replies(answer: Answer, turns: list[dict[str, Any]]) -> bool:
    """Append what the user says that each called tool answers; whether there is a reply to every call.

    An empty line, or the end of the input, leaves a call without a reply.
    """
    for call in answer.calls:
        name = call["function"]["name"]
        try:
            text = input(f"{printable(name)} answers> " if sys.stdin is not None and sys.stdin.isatty() else "")
        except (EOFError, RuntimeError):  # RuntimeError: there is no standard input
            return False
        if not text.strip():
            return False
        turns.append({"role": "tool", "name": name, "content": text})
    return bool(answer.calls)
