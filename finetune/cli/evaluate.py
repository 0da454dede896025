"""`finetune eval` and `finetune chat`: the tuned model compared with the base model."""

from __future__ import annotations

import os
import sys
from typing import TYPE_CHECKING, Any

from rich.markup import escape

from finetune.cli.app import print_json
from finetune.cli.render import doing, err, out, printable, table
from finetune.plan.plan import read_plan
from finetune.run.card import cards_of, visibility
from finetune.run.directory import open_run
from finetune.units import format_seconds

if TYPE_CHECKING:
    from finetune.evaluate.paired import Difference
    from finetune.run.directory import RunDirectory

_EXAMPLES_SHOWN = 2


def show_scores(source: str, *, rows: int | None, last: bool, as_json: bool) -> None:
    """Score base and tuned model on the held-out rows."""
    run = open_run(source)
    _see_its_card(run)
    from finetune.evaluate.score import compare

    with doing(quiet=as_json) as say:
        result = compare(run, rows=rows, last=last, progress=say)
    if as_json:
        print_json({"run": str(run.path), **result.as_json()})
        return
    out.print(f"[bold]{escape(str(run.path))}[/]: {result.rows} held-out rows, {format_seconds(result.seconds)}")
    shown = table("", ">base", ">tuned")
    shown.add_row("exact match", _percent(result.base.exact_match), _percent(result.tuned.exact_match))
    shown.add_row("loss per trained token", _number(result.base.loss), _number(result.tuned.loss))
    shown.add_row("perplexity", _number(result.base.perplexity), _number(result.tuned.perplexity))
    out.print(shown)
    out.print(f"exact match: {_told(result.exact_match_difference, 100, ' points')}")
    out.print(f"loss: {_told(result.loss_difference, 1, '')}")
    answered = zip(
        result.prompts, result.references, result.base.answers, result.tuned.answers,
        result.base.exact, result.tuned.exact, strict=True,
    )  # fmt: skip
    for prompt, reference, base, tuned, *_ in sorted(answered, key=lambda row: (row[5] - row[4], row[5]))[:_EXAMPLES_SHOWN]:
        out.print(f"\n[dim]{escape(prompt.strip())}[/]")
        out.print(f"  wanted {escape(reference)}\n  base   {escape(_one_line(base))}\n  tuned  {escape(_one_line(tuned))}")


def chat_with(source: str, *, base: bool, prompt: str | None, system: str | None, max_new_tokens: int, as_json: bool) -> None:
    """Answer `prompt`, or chat until Ctrl-D or `exit`."""
    run = open_run(source)
    with doing(quiet=as_json) as say:
        say("loading the model")
        _see_its_card(run)
        from finetune.evaluate.answerer import Answerer

        answerer = Answerer(run, need_adapter=not base)
    if answerer.plain and not as_json:
        err.print("[dim]trained on prompts without the chat template: each message is sent as it is, without those before[/]")
    messages: list[dict[str, Any]] = [{"role": "system", "content": system}] if system else []
    for question in [prompt] if prompt is not None else _questions():
        messages.append({"role": "user", "content": question})
        if base:
            with answerer.as_base():
                answer = answerer.answer([answerer.prompt_ids(messages)], max_new_tokens=max_new_tokens)[0]
        else:
            answer = answerer.answer([answerer.prompt_ids(messages)], max_new_tokens=max_new_tokens)[0]
        messages.append({"role": "assistant", "content": answer})
        if as_json:
            print_json({"run": str(run.path), "model": "base" if base else "tuned", "prompt": question, "answer": answer})
        else:
            print(printable(answer))


def _see_its_card(run: RunDirectory) -> None:
    """Let this process see only the card that the run was planned for; before imports, as bitsandbytes asks CUDA in its own."""
    os.environ.update(visibility(cards_of(read_plan(run.plan))[:1]))


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


def _one_line(text: str) -> str:
    flat = " ".join(printable(text).split())
    return flat if len(flat) <= 160 else flat[:157] + "..."


def _told(difference: Difference | None, scale: float, unit: str) -> str:
    """A difference and its interval in words."""
    if difference is None:
        return "not measured"
    low, value, high = (f"{scale * each:+.3g}" for each in (difference.low, difference.value, difference.high))
    text = f"tuned - base {value}{unit} (95 % interval {low} to {high})"
    if difference.is_told:
        return text
    more = f"; about {difference.more_rows:,} more rows would" if difference.more_rows else ""
    return f"can't tell yet{more}: {text}"


def _percent(share: float | None) -> str:
    return "not measured" if share is None else f"{share:.1%}"


def _number(value: float | None) -> str:
    return "not measured" if value is None else f"{value:.4f}"
