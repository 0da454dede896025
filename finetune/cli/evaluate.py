"""`finetune eval` and `finetune chat`: the tuned model compared with the base model."""

from __future__ import annotations

import contextlib
import functools
import os
import signal
import sys
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.markup import escape

from finetune.cli.output import print_json
from finetune.cli.render import err, out, show_progress, table
from finetune.errors import CommandError
from finetune.planner.plan import read_plan
from finetune.printable import printable
from finetune.run.base_adapter import base_adapter_of
from finetune.run.card import cards_of, visibility
from finetune.run.directory import open_run
from finetune.units import format_measured, format_seconds

if TYPE_CHECKING:
    from finetune.data.pictures.source import PictureSource
    from finetune.evaluate.answerer import Answerer
    from finetune.evaluate.score import Comparison
    from finetune.evaluate.scorers import Scorer
    from finetune.run.directory import RunDirectory

#: How shares and other numbers are written.
_SHARE, _NUMBER = ".1%", ".4f"
_ORDERS = {"differ": "where they differ most", "worst": "the tuned model's worst", "best": "the tuned model's best"}


def show_scores(
    source: str, *, rows: int | None, last: bool, data: str | None, score: Scorer | None, show: str, examples: int,
    as_json: bool, forgetting: bool = False, probe: bool = False,
) -> None:  # fmt: skip
    """Score base and tuned model on the held-out rows, or those of the file `data`; progress is on standard error.

    `forgetting`: on those of the run whose adapter it continued. `probe`: also measure forgetting.
    """
    if show not in _ORDERS:
        raise CommandError(f"--show {show[:40]!r} is not known", f"Use one of {', '.join(_ORDERS)}.")
    if forgetting and data is not None:
        raise CommandError("--forgetting and --data each choose the rows", "Keep one of them.")
    run = open_run(source)
    restrict_visible_devices(run)
    from finetune.evaluate.call_score import NO_CALL_DUE
    from finetune.evaluate.forgetting import load_answerer, measure_forgetting
    from finetune.evaluate.no_call import measure_no_call
    from finetune.evaluate.paired import format_difference, rank_rows
    from finetune.evaluate.score import compare

    if score is not None and score.name in ("judge", "code"):
        err.print(f"[yellow]{escape(score.score_answer.notice)}[/]")  # type: ignore[attr-defined]
    if score is not None and score.name == "judge":
        score.score_answer.keep_in(run)  # type: ignore[attr-defined]
    copies = read_plan(run.plan).layer_copies
    if copies:
        err.print(f"[dim]{copies.generation_summary}[/]")
    with show_progress(quiet=False) as progress:

        @functools.cache
        def load() -> Answerer:
            progress("loading base model and adapter")
            return load_answerer(run, last)

        result = compare(run, rows=rows, last=last, data=data, forgetting=forgetting, score=score, load=load, progress=progress)
        probe = probe and data is None and not forgetting
        losses = measure_forgetting(run, last=last, load=load, progress=progress) if probe else []
        no_call = measure_no_call(run, load, last=last, progress=progress) if probe else None
    if as_json:
        measured = {"lost": [asdict(group) for group in losses], "no_call": asdict(no_call) if no_call else None}
        print_json({"run": str(run.path), **result.as_json(), **measured})
        return
    origin = base_adapter_of(run)
    kind = (
        f"held-out rows of {Path(origin.name).name}"
        if forgetting and origin
        else f"rows of {data}"
        if data
        else "held-out rows"
    )
    names = ("before", "now") if result.against_adapter else ("base", "tuned")
    gap = " - ".join(reversed(names))
    if len(result.tuned.row_losses) > result.rows:
        kind += f", loss of {len(result.tuned.row_losses)} sequences"
    reused = f", {result.reused:,} results from an earlier evaluation" if result.reused else ""
    out.print(f"[bold]{escape(str(run.path))}[/]: {result.rows} {escape(kind)}, {format_seconds(result.seconds)}{reused}")
    if no_call and no_call.is_worse:
        out.print(f"[red]worse:[/] {escape(no_call.summary())}")
    restraint = result.field_differences.get(NO_CALL_DUE)
    if restraint and restraint.is_significant and restraint.value < 0:
        verdict = format_difference(restraint, 100, " points", gap)
        out.print(f"[red]worse:[/] calls tools in rows where none is due: {verdict}")
    if result.trained_rows:
        share = f"{result.trained_rows:,} of these {len(result.tuned.row_losses):,} sequences"
        out.print(f"[yellow]note:[/] the run was trained on {share}: what is learnt by heart scores well here")
    for note in result.notes:
        err.print(f"[yellow]{escape(note)}[/]")
    out.print(_table(result, names))
    if result.tuned.answers:
        from finetune.evaluate.scorers import are_json_objects

        if result.score == "exact" and are_json_objects(result.references):
            out.print("the expected answers are JSON; to score them field by field:  --score json")
        if result.score != "exact":
            out.print(f"{escape(result.score)}: {format_difference(result.score_difference, names=gap)}")
        out.print(f"exact match: {format_difference(result.exact_match_difference, 100, ' points', gap)}")
        gaps = [tuned - base for base, tuned in zip(result.base.scores, result.tuned.scores, strict=True)]
        better, worse = sum(value > 0 for value in gaps), sum(value < 0 for value in gaps)
        than = "before" if result.against_adapter else "the base's"
        out.print(f"rows: {better:,} better than {than}, {worse:,} worse, {len(gaps) - better - worse:,} the same")
    if result.tuned.margins:
        out.print(f"pairs in order: {format_difference(result.pairs_in_order_difference, 100, ' points', gap)}")
        out.print(f"margin of a pair: {format_difference(result.pair_margin_difference, names=gap)}")
    if result.labels_in_order is not None:
        out.print(f"good answers gained more than bad ones in {result.labels_in_order:{_SHARE}} of all pairs of these rows")
    out.print(f"loss: {format_difference(result.loss_difference, names=gap)}")
    for name, gap_of_field in result.field_differences.items():
        out.print(f"  {escape(name)}: {format_difference(gap_of_field, 100, ' points', gap)}")
    if losses:
        out.print("\nforgetting:")
        for group in losses:
            out.print(f"  {escape(group.summary())}")
    if no_call:
        out.print(f"  {escape(no_call.summary())}")
    shown = rank_rows(result.base.scores, result.tuned.scores, show)[:examples]
    if shown:
        out.print(f"\nrows, {_ORDERS[show]} first:")
    for row in shown:
        base, tuned = result.base, result.tuned
        out.print(f"\n[dim]{escape(result.prompts[row].strip())}[/]")
        out.print(f"  wanted       {escape(_one_line(result.references[row]))}")
        out.print(f"  {names[0]:6} {base.scores[row]:5.3g} {escape(_one_line(base.answers[row]))}")
        out.print(f"  {names[1]:6} {tuned.scores[row]:5.3g} {escape(_one_line(tuned.answers[row]))}")


def show_quantisation(source: str, *, last: bool, as_json: bool) -> None:
    """The loss of a run's base and tuned model on its held-out rows by format of the base's weights."""
    run = open_run(source)
    from finetune.cli.quantisation import measure_run, won_back
    from finetune.evaluate.answerer import adapter_folder

    folder = adapter_folder(run, last=last)
    assert folder is not None
    with show_progress(quiet=as_json) as progress:
        costs = measure_run(run, folder, progress)
    steps = won_back(run, costs["base"])
    if as_json:
        by_model = {name: cost.as_json() for name, cost in costs.items()}
        print_json({"run": str(run.path), "quantisation": by_model, "steps_to_win_back": steps})
        return
    for cost in costs.values():
        out.print(escape(cost.sentence))
    if steps is not None:
        out.print(f"The run had won back what its format costs after about {steps:,} step{'' if steps == 1 else 's'}.")


def _table(result: Comparison, names: tuple[str, str]) -> Any:
    """Each score of both models."""
    from finetune.evaluate.scorers import VALID_LABELS

    base, tuned = result.base, result.tuned
    rows: list[tuple[str, str, float | None, float | None]] = []
    if tuned.answers:
        rows.append(("exact match", _SHARE, base.exact_match, tuned.exact_match))
    if tuned.answers and result.score != "exact":
        rows.append((escape(result.score), _NUMBER, base.score, tuned.score))
    if tuned.valid is not None:
        rows.append((VALID_LABELS.get(result.score, "valid JSON"), _SHARE, base.valid, tuned.valid))
    rows += [(f"  {escape(_one_line(name))}", _SHARE, base.fields[name], tuned.fields[name]) for name in tuned.fields]
    if tuned.margins:
        rows.append(("pairs in order", _SHARE, base.pairs_in_order, tuned.pairs_in_order))
        rows.append(("margin of a pair, nats", _NUMBER, base.pair_margin, tuned.pair_margin))
    rows.append(("loss per trained token", _NUMBER, base.loss, tuned.loss))
    rows.append(("perplexity", _NUMBER, base.perplexity, tuned.perplexity))
    rows.append(("token accuracy", _SHARE, base.token_accuracy, tuned.token_accuracy))
    shown = table("", *(f">{name}" for name in names))
    for label, form, *values in rows:
        shown.add_row(label, *(format_measured(value, form) for value in values))
    return shown


def chat_with(
    source: str, *, models: tuple[str, ...], prompt: str | None, system: str | None, max_new_tokens: int,
    temperature: float, top_p: float, seed: int, as_json: bool, others: Sequence[str] = (), tools_file: str | None = None,
) -> None:  # fmt: skip
    """Answer `prompt`, or chat until Ctrl-D or `exit`, with each of `models` (base, tuned) from the same seed.

    The runs of `others` share the base model: all answer the prompt; in a chat the first does until `/use NAME`.
    `tools_file`: JSON with the tools that the models may call; the user types what they answer.
    """
    from finetune.cli.chat_pictures import COMMAND, ChatPictures
    from finetune.cli.chat_tools import answer_turns, ask_for_replies, print_calls, read_tools_file, require_calls
    from finetune.data.pictures.placement import message_with_pictures

    tools = read_tools_file(tools_file)
    if prompt is not None and not prompt.strip():
        raise CommandError("--prompt is empty", "Give a prompt, or leave the option out to chat.")
    runs = [open_run(source) for source in dict.fromkeys([source, *others])]
    if len({run.path.name for run in runs}) < len(runs):
        raise CommandError("two of these runs have the same name", "Rename one: finetune runs rename RUN NAME")
    run = runs[0]
    with show_progress(quiet=as_json) as progress:
        progress("loading the model")
        restrict_visible_devices(run)
        from finetune.evaluate.answerer import Answerer
        from finetune.evaluate.kv_cache import chat_memory
        from finetune.model.generate import Sampling

        if not as_json:
            memory = chat_memory(read_plan(run.plan), max_new_tokens)
            err.print(f"[{'dim' if memory.fits else 'yellow'}]{memory.summary()}[/]")
        first = Answerer(run, need_adapter="tuned" in models or len(runs) > 1)
        answerers = {run.path.name: first, **{other.path.name: first.sharing_base(other) for other in runs[1:]}}
        if tools:
            for answerer in answerers.values():
                require_calls(answerer)
    if first.plan.layer_copies and not as_json:
        err.print(f"[dim]{first.plan.layer_copies.generation_summary}[/]")
    if first.plain and not as_json:
        err.print("[dim]trained on prompts without the chat template: each message is sent as it is, without those before[/]")
    if len(runs) > 1 and prompt is None and not as_json:
        err.print(f"[dim]{escape(run.path.name)} answers; /use {escape(' or /use '.join(list(answerers)[1:]))} changes that[/]")
    sampling, start = Sampling(temperature, top_p, seed), [{"role": "system", "content": system}] if system else []
    messages: dict[tuple[str, str], list[dict[str, Any]]] = {}
    sent: dict[tuple[str, str], list[PictureSource]] = {}
    pictures = ChatPictures()
    used = [run.path.name] if prompt is None else list(answerers)
    for question in [prompt] if prompt is not None else _questions():
        if prompt is None and question.split()[:1] == ["/use"]:
            used = _switch_run(question, used, answerers, as_json)
            continue
        if prompt is None and question.split()[:1] == [COMMAND]:
            _add_picture(pictures, question, first, as_json)
            continue
        added = pictures.take()
        asked = [(name, model) for model in models for name in (used if model == "tuned" else used[:1])]
        for name, model in asked:
            answerer, turns = answerers[name], messages.setdefault((name, model), list(start))
            turns.append(message_with_pictures(question, len(added)))
            seen = sent[name, model] = [*sent.get((name, model), ()), *added]
            if len(asked) > 1 and not as_json:
                out.print(f"[bold]{escape(name) if len(runs) > 1 and model == 'tuned' else model}[/]")
            while True:
                with answerer.using(model), _stop_on_ctrl_c() as stopped:
                    reply, answer = answer_turns(
                        answerer, turns, tools, (lambda _: None) if as_json else _print_piece, seen,
                        max_new_tokens=max_new_tokens, sampling=sampling, stopped=stopped,
                    )  # fmt: skip
                if as_json:
                    calls = {"calls": answer.calls} if tools else {}
                    print_json({
                        "run": str(answerer.run.path), "model": model, "prompt": question, "answer": answer.text, **calls,
                        "tokens": reply.tokens, "tokens_per_s": reply.tokens_per_s, "stopped": reply.stopped,
                    })  # fmt: skip
                else:
                    print(end="\n" if answer.text or not answer.calls else "")
                    print_calls(answer)
                    rate = f", {reply.tokens_per_s:.1f} tokens/s" if reply.tokens_per_s else ""
                    err.print(f"[dim]{reply.tokens:,} tokens{rate}{', stopped' if reply.stopped else ''}[/]")
                    if prompt is not None and reply.stopped:
                        raise KeyboardInterrupt
                if prompt is not None or not ask_for_replies(answer, turns):
                    break


def _add_picture(pictures: Any, command: str, answerer: Answerer, as_json: bool) -> None:
    """Add the picture of `/image PATH`; a file that is no picture is said, and the chat goes on."""
    try:
        note = pictures.add(command, answerer)
    except CommandError as error:
        note = " ".join([*error.problems, error.fix]).strip()
    if not as_json:
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


def restrict_visible_devices(run: RunDirectory) -> None:
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
