"""`finetune run`, `resume`, `watch`, `pause` and `finish`."""

from __future__ import annotations

import math
import sys
import time
from collections.abc import Iterator
from contextlib import nullcontext
from typing import TYPE_CHECKING, Any

from rich.markup import escape
from rich.status import Status

from finetune import events
from finetune.card.visible import hide_gpus
from finetune.cli.output import print_json
from finetune.cli.render import err, out, print_summary, show_progress, state_text, step_line
from finetune.cli.source import recipe_of, require_dataset
from finetune.errors import FAILED, FINISHED, CommandError, Diverged
from finetune.run import control
from finetune.run.base_adapter import base_adapter_of
from finetune.run.directory import RunDirectory, open_run, runs_from_here
from finetune.run.memory import outcome
from finetune.run.retry import explanation
from finetune.run.state import Pace, RunState, read_state
from finetune.settings.methods import MAIN_METRICS, METRICS
from finetune.system import caught_interrupts, shell_join
from finetune.units import format_bytes, format_count, format_seconds, printable

if TYPE_CHECKING:
    from finetune.data.report import DataReport

_EXIT_DEADLINE_S = 60  # for the processes of an ended run to free the GPU before a command returns
_EXIT_CODES = {"finished": FINISHED, Diverged.run_state: Diverged.exit_code}


def run_recipe(
    source: str | None, overrides: list[str], *, model: str | None, data: str | None, as_json: bool, force: bool, detach: bool,
    measure: bool, alone: bool,
) -> int:  # fmt: skip
    """Plan, start and follow a run."""
    recipe = recipe_of(source, overrides, model=model, data=data)
    require_dataset(recipe)
    if alone:  # else the dry run opens a CUDA context of 0.3 to 0.5 GiB, which the run then lacks
        hide_gpus()
    from finetune.run.prepare import create_run, prepare

    if measure:
        from finetune.evaluate.quantisation import measure_recipe

        with show_progress(quiet=as_json) as progress:
            cost = measure_recipe(recipe, progress, force=force)
    with control.early_supervisor() as supervisor:
        with show_progress(quiet=False) as progress:  # on stderr, even beside JSON: the page shows it
            prepared = prepare(recipe, force=force, progress=progress)
        run = create_run(prepared)
        if not as_json:
            _print_start(run, prepared)
            if measure:
                out.print(f"{escape(cost.sentence)}\n")
        control.start(run, early=supervisor)
    if detach:
        _print_state(run, read_state(run), as_json)
        return 0
    return _follow(run, 0, as_json)


def resume_run(source: str, overrides: list[str], *, as_json: bool) -> int:
    """Resume and follow a run."""
    if "=" in source:  # finetune resume save_steps=50
        source, overrides = "latest", [source, *overrides]
    run = open_run(source)
    if overrides:  # `update_settings` refuses settings that change the result
        changed = ", ".join(f"{name}={value}" for name, value in control.update_settings(run, overrides).items())
        if not as_json:
            out.print(f"from now on {escape(changed)}")
    offset = run.events.stat().st_size if run.events.exists() else 0  # events of earlier attempts are not printed again
    control.resume(run)
    return _follow(run, offset, as_json)


def watch_run(source: str, *, as_json: bool) -> int:
    """Follow a run. Ctrl-C does not pause it."""
    return _follow(open_run(source), 0, as_json, pause_on_interrupt=False)


def pause_run(source: str, *, now: bool = False, all_runs: bool = False, as_json: bool) -> None:
    """Pause a run and wait; `now`: without a checkpoint."""
    runs = runs_from_here() if all_runs else [open_run(source)]
    # all get the request before the first wait: their steps end in parallel
    stopping = [run for run in runs if control.stop(run)]
    if now:
        time.sleep(0.3)  # two signals sent together would arrive as one
        for run in stopping:
            control.stop(run, now=True)
    for run in stopping:
        control.wait(run, deadline_s=300)  # for the step and its checkpoint
        state = read_state(run)
        if now or state.state != "paused" or as_json:
            _print_state(run, state, as_json)
        else:
            position = f"step {state.step:,} of {state.total_steps:,}" if state.step and state.total_steps else "its start"
            out.print(f"paused at {position}. To continue:  finetune resume {escape(str(run.path))}")
    if not stopping and not all_runs:
        _print_state(runs[0], read_state(runs[0]), as_json)
    elif not stopping and not as_json:
        out.print("No run is running.")


def finish_run(source: str, *, as_json: bool) -> None:
    """End a run after its current step and wait up to an hour. Raises CommandError or DiskFull."""
    run = open_run(source)
    state = read_state(run)
    if state.state == "queued":
        raise CommandError(f"{run.path} has not begun: {state.message}", f"Remove it from the queue: finetune pause {run.path}")
    if not control.finish(run):
        fix = "" if state.state == "finished" else f"Resume it first: finetune resume {run.path}"
        raise CommandError(f"{run.path} is not running: {state.state}", fix)
    control.wait(run, deadline_s=3600)  # an evaluation follows the step
    _print_state(run, read_state(run), as_json)


def _print_start(run: RunDirectory, prepared: Any) -> None:
    plan, settings = prepared.plan, prepared.plan.settings
    print_summary(plan)
    data, tokens = plan.data, format_count(plan.data.total_tokens)
    out.print(
        f"{data.rows:,} rows, {data.eval_rows:,} held out, {tokens} tokens; {plan.total_steps} steps of "
        f"{settings.per_device_train_batch_size} x {settings.gradient_accumulation_steps} rows, "
        f"learning rate {settings.learning_rate:g}"
    )
    for name, report in (("Training", prepared.data.report), ("Held-out", prepared.data.eval_report)):
        if report is not None:
            for line in _data_lines(name, report):
                out.print(line)
    if origin := base_adapter_of(run):
        out.print(f"Continues from {escape(origin.summary())}")
    out.print(f"Run directory: {escape(str(run.path))}\n")


def _data_lines(name: str, report: DataReport) -> Iterator[str]:
    if report.rows_read != report.rows_used:
        yield f"{name} data: {escape(report.account())}"
    if report.unused_columns:
        yield f"{name} data: columns not used: {escape(', '.join(report.unused_columns))}"
    for warning in report.warnings:
        prefix = "" if name == "Training" else "held-out data: "
        yield f"[yellow]note:[/] {prefix}{escape(warning)}"


def _follow(run: RunDirectory, offset: int, as_json: bool, *, pause_on_interrupt: bool = True) -> int:
    # with `pause_on_interrupt`, Ctrl-C or SIGTERM pauses the run; otherwise it only ends the watching
    is_live = out.is_terminal and not as_json
    with caught_interrupts() as interrupts, out.status("starting") if is_live else nullcontext() as status:
        for event, left_s in _events(run, offset, interrupts, pause_on_interrupt):
            if as_json:
                print_json(events.event_json(event) | ({} if left_s is None else {"left_s": left_s}))
                sys.stdout.flush()
            else:
                _show_event(event, left_s, status)
    state = read_state(run)
    if state.ended:
        control.wait(run, _EXIT_DEADLINE_S)
    _print_state(run, state, as_json)
    if not state.ended:  # only the watching was interrupted
        return 0
    return state.exit_code if state.exit_code is not None else _EXIT_CODES.get(state.state, FAILED)


def _events(
    run: RunDirectory, offset: int, interrupts: list[int], pause_on_interrupt: bool
) -> Iterator[tuple[events.Event, float | None]]:
    reader, handled, pace = events.EventReader(run.events, offset), 0, Pace()
    assumed_alive_until_s = time.monotonic() + 20  # a supervisor takes a moment to start
    while True:
        for event in reader.new():
            assumed_alive_until_s = time.monotonic()
            pace.add(event)
            yield event, pace.left_s if isinstance(event, events.Step) else None
        if len(interrupts) > handled:
            now = handled > 0  # the second Ctrl-C
            handled = len(interrupts)
            if not pause_on_interrupt:
                return
            when = "now, without a checkpoint" if now else "after this step; Ctrl-C again skips the checkpoint"
            err.print(f"\n[yellow]stopping {when}[/]")
            control.stop(run, interrupts[-1], now=now)
        if time.monotonic() > assumed_alive_until_s and read_state(run).ended:
            yield from ((event, None) for event in reader.new())
            return
        time.sleep(0.1)


def _print_state(run: RunDirectory, state: RunState, as_json: bool) -> None:
    if as_json:
        facts = {"state": state.state, "message": state.message, "step": state.step, "exit_code": state.exit_code}
        print_json({"run": str(run.path), **facts})
        return
    if state.state == "finished":
        name = escape(shell_join([str(run.path)]))
        held_out = "" if (run.data / "eval").is_dir() else " --data FILE"
        summary, is_outside_forecast = outcome(events.read_events(run.events))
        out.print(f"[bold {'yellow' if is_outside_forecast else 'green'}]Finished in {summary}[/]\n{escape(state.message)}")
        out.print(f"Next: finetune eval {name}{held_out}", f"finetune chat {name}", f"finetune export {name}", sep="\n      ")
        return
    out.print(state_text(state.state, "bold"), "", escape(state.message))
    if state.state == "paused" and "finetune resume" not in state.message:
        out.print(f"Resume:      finetune resume {escape(shell_join([str(run.path)]))}")
    elif state.state == "failed":
        out.print(f"Log: {escape(str(run.log))}")


def _show_event(event: events.Event, left_s: float | None, status: Status | None) -> None:
    # a terminal shows the newest step in a status line; a file gets about twenty steps as lines
    if isinstance(event, events.Step):
        interval = max(1, (event.total_steps or 0) // 20)
        if status:
            status.update(escape(step_line(event, left_s)))
        elif event.step % interval == 0 or event.step in (1, event.total_steps):
            print(step_line(event, left_s), flush=True)
        return
    text = _event_text(event)
    if text and status:
        out.print(escape(text))
    elif text:
        print(printable(text), flush=True)


def _event_text(event: events.Event) -> str:
    match event:
        case events.Evaluation() if event.eval_loss is not None and math.isfinite(event.eval_loss):
            metrics = ""
            for name in (name for name in MAIN_METRICS if name in event.metrics):
                label, template = METRICS[name]
                metrics += f", {label} {template.format(event.metrics[name])}"
            return f"step {event.step}: held-out loss {event.eval_loss:.4f}{metrics} ({format_seconds(event.eval_s)})"
        case events.Checkpoint():
            took_s = (event.save_s or 0) + (event.seal_s or 0)
            return f"step {event.step}: checkpoint sealed, {format_bytes(event.bytes)} in {took_s:.2f} s"
        case events.RunWarning():
            return f"note: {event.message}"
        case events.OutOfMemory():
            return f"out of memory: {explanation(event)}"
        case events.Retry():
            changes = ", ".join(f"{name}={value}" for name, value in event.changes.items())
            return f"{event.reason}; retrying with {changes} (attempt {event.attempt})"
        case events.Start():
            start = event.resumed_from or "the beginning"
            exactness = "bit-exact" if event.exact else f"approximate: {'; '.join(event.approximate_because)}"
            return f"training from {start}; resuming is {exactness}"
    return ""
