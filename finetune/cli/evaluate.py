"""`finetune eval` and `finetune chat`: the tuned model compared with the base model."""

from __future__ import annotations

import sys
from typing import Any

from rich.markup import escape

from finetune.cli.app import print_json
from finetune.cli.render import doing, out, printable, table
from finetune.run.directory import open_run
from finetune.units import format_seconds

_EXAMPLES_SHOWN = 2


def show_scores(source: str, *, rows: int | None, as_json: bool) -> None:
    """Score base and tuned model on the held-out rows."""
    run = open_run(source)
    from finetune.evaluate.score import compare

    with doing(quiet=as_json) as say:
        result = compare(run, rows=rows, progress=say)
    if as_json:
        print_json({"run": str(run.path), **result.as_json()})
        return
    out.print(f"[bold]{escape(str(run.path))}[/]: {result.rows} held-out rows, {format_seconds(result.seconds)}")
    shown = table("", ">base", ">tuned")
    shown.add_row("exact match", _percent(result.base.exact_match), _percent(result.tuned.exact_match))
    shown.add_row("loss per trained token", _number(result.base.loss), _number(result.tuned.loss))
    out.print(shown)
    for prompt, reference, base, tuned in list(
        zip(result.prompts, result.references, result.base.answers, result.tuned.answers, strict=True)
    )[:_EXAMPLES_SHOWN]:
        out.print(f"\n[dim]{escape(prompt.strip())}[/]")
        out.print(f"  wanted {escape(reference)}\n  base   {escape(_one_line(base))}\n  tuned  {escape(_one_line(tuned))}")


def chat_with(source: str, *, base: bool, prompt: str | None, system: str | None, max_new_tokens: int, as_json: bool) -> None:
    """Answer `prompt`, or chat until Ctrl-D or `exit`."""
    run = open_run(source)
    with doing(quiet=as_json) as say:
        say("loading the model")
        from finetune.evaluate.answerer import Answerer

        answerer = Answerer(run, need_adapter=not base)
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


def _percent(share: float | None) -> str:
    return "not measured" if share is None else f"{share:.1%}"


def _number(value: float | None) -> str:
    return "not measured" if value is None else f"{value:.4f}"
