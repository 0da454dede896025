"""`finetune sweep`: start a sweep, or continue, follow, stop or show one."""

from __future__ import annotations

import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.markup import escape

from finetune.card.visible import environment_with_gpus, hide_gpus
from finetune.cli.output import print_json
from finetune.cli.render import err, out, show_progress, table
from finetune.cli.source import recipe_of, require_dataset
from finetune.errors import FINISHED, STOPPED, CommandError, DiskFull
from finetune.system import start_detached
from finetune.units import format_seconds

if TYPE_CHECKING:
    from finetune.settings import Recipe
    from finetune.sweep.sweep import ArmResult, Sweep

_POLL_S = 0.3
#: Seconds that the driver's process gets to start.
_START_S = 60.0
_UNITS_S = {"s": 1.0, "m": 60.0, "h": 3600.0, "d": 86400.0}


def sweep_command(
    source: str | None, overrides: list[str], *, model: str | None, data: str | None, budget: str | None, detach: bool,
    stop: bool, show: bool, as_json: bool, alone: bool = False,
) -> int:  # fmt: skip
    """Start a sweep of a recipe; of a sweep's folder, go on with it, or `stop` or `show` it. Returns the exit code.

    `alone`: the process does nothing else.
    """
    if alone:
        hide_gpus()
    from finetune.sweep.sweep import is_sweep, open_sweep

    folder = _sweep_folder(source)
    if folder is not None and is_sweep(folder):
        if overrides or budget:
            raise CommandError("a sweep's settings can't change", f"Start another: finetune sweep {folder / 'sweep.json'}")
        sweep = open_sweep(folder)
        if stop:
            return _stop(sweep, as_json)
    elif stop or show:
        raise CommandError(f"{source} is no sweep", "Give the folder of one, which has a sweep.json.")
    else:
        sweep = _created(source, overrides, model=model, data=data, budget=budget, quiet=as_json)
        _print_arms(sweep, as_json)
    if show or sweep.is_finished:
        return _print_result(sweep, as_json)
    if not sweep.is_running:
        _start(sweep)
    return _print_state(sweep, as_json) if detach else _follow(sweep, as_json)


def _sweep_folder(source: str | None) -> Path | None:
    if not source:
        return None
    return next((path for path in (Path(source), Path("runs") / source) if path.is_dir()), None)


def _created(
    source: str | None, overrides: list[str], *, model: str | None, data: str | None, budget: str | None, quiet: bool
) -> Sweep:
    from finetune.sweep.create import create_sweep
    from finetune.sweep.grid import split_overrides

    if source and "=" in source and not Path(source).exists():  # finetune sweep --model X learning_rate=1e-4,2e-4
        overrides, source = [source, *overrides], None

    def parse(changes: list[str]) -> Recipe:
        return recipe_of(source, changes, model=model, data=data)

    fixed, swept = split_overrides(overrides, parse)
    budget_s = _seconds_of(budget) if budget else None
    require_dataset(parse(fixed))

    def with_values(values: dict[str, Any]) -> Recipe:
        return parse([*fixed, *(f"{name}={value}" for name, value in values.items())])

    with show_progress(quiet=quiet) as progress:
        return create_sweep(with_values, swept, budget_s=budget_s, progress=progress)


def _seconds_of(text: str) -> float:
    """Seconds of `3h`, `90m` or `1.5d`."""
    number, unit = text[:-1], text[-1:]
    try:
        seconds = float(number) * _UNITS_S[unit]
    except (ValueError, KeyError):
        seconds = 0.0
    if not seconds > 0:
        raise CommandError(f"--budget {text[:20]!r} is no time", "Give a number and s, m, h or d, such as 3h or 90m.")
    return seconds


def _start(sweep: Sweep) -> None:
    """Start the process that drives the sweep. Raises DiskFull."""
    sweep.stop_request.unlink(missing_ok=True)
    try:
        with sweep.log.open("ab") as log:
            command = [sys.executable, "-P", "-m", "finetune.sweep.driver", str(sweep.path)]
            process = start_detached(command, log, env=environment_with_gpus())
    except OSError as error:
        raise DiskFull(f"{sweep.log} can't be written: {error.strerror or error}", "Free some space.") from None
    _wait_for_start(sweep, process)


def _wait_for_start(sweep: Sweep, process: subprocess.Popen[bytes]) -> None:
    end_s = time.monotonic() + _START_S
    while not sweep.is_running and process.poll() is None and time.monotonic() < end_s:
        time.sleep(0.05)


def _follow(sweep: Sweep, as_json: bool) -> int:
    """Print the driver's lines until it ends; Ctrl-C and SIGTERM stop the sweep after the arm's step."""
    interrupts: list[int] = []
    signals = (signal.SIGINT, signal.SIGTERM)
    previous_handlers = [signal.signal(number, lambda number, _: interrupts.append(number)) for number in signals]
    offset = max(0, sweep.log.stat().st_size if sweep.log.exists() else 0) if sweep.is_running else 0
    try:
        while True:
            running = sweep.is_running
            if not as_json:
                offset = _print_new_lines(sweep, offset)
            if not running:
                break
            if interrupts and not sweep.stop_request.exists():
                err.print("[yellow]stopping after this step, with a checkpoint[/]")
                sweep.stop_request.touch()
            time.sleep(_POLL_S)
    finally:
        for number, handler in zip(signals, previous_handlers, strict=True):
            signal.signal(number, handler)
    if sweep.is_finished:
        return _print_result(sweep, as_json)
    _print_state(sweep, as_json)
    return STOPPED[0] if interrupts else 1


def _print_new_lines(sweep: Sweep, offset: int) -> int:
    with sweep.log.open("rb") as log:
        log.seek(offset)
        text = log.read().decode("utf-8", errors="replace")
    whole = text[: text.rfind("\n") + 1]
    for line in whole.splitlines():
        out.print(escape(line), soft_wrap=True)
    return offset + len(whole.encode("utf-8"))


def _stop(sweep: Sweep, as_json: bool) -> int:
    if sweep.is_running:
        sweep.stop_request.touch()
        while sweep.is_running:
            time.sleep(_POLL_S)
    _print_state(sweep, as_json)
    return FINISHED


def _print_arms(sweep: Sweep, as_json: bool) -> None:
    if as_json:
        return
    from finetune.sweep.sweep import label

    facts = sweep.facts
    out.print(f"[bold]{escape(str(sweep.path))}[/]: {len(facts.arms)} arms, {facts.rungs[-1]:,} steps each")
    for arm in facts.arms:
        out.print(f"  {escape(label(arm.values))}")
    for entry in facts.left_out:
        out.print(f"  [yellow]left out:[/] {escape(label(entry.values))}: {escape(entry.reason)}")
    if cards := sorted({arm.card for arm in facts.arms if arm.card is not None}):
        out.print(f"Trained at once on cards {', '.join(cards)}, one arm on each.")
    steps = ", ".join(f"{rung:,}" for rung in facts.rungs[:-1])
    out.print(f"Compared after {steps} steps: {escape(facts.rule)}. All arms have the same seed, rows and order.")
    length = "not measured here" if facts.forecast_s is None else f"about {format_seconds(facts.forecast_s)} at most"
    out.print(f"Time: {length}\n")


def _print_state(sweep: Sweep, as_json: bool) -> int:
    if as_json:
        print_json(sweep.as_json())
    else:
        state = "running" if sweep.is_running else "stopped"
        out.print(f"{state}: {escape(sweep.sentence())}")
        out.print(f"Go on with it, or follow it:  finetune sweep {escape(str(sweep.path))}", soft_wrap=True)
    return 0


def _print_result(sweep: Sweep, as_json: bool) -> int:
    report = _report(sweep)
    if as_json:
        print_json({**sweep.as_json(), "report": None if report is None else str(report)})
        return 0
    shown = table("arm", "state", ">steps", ">held-out loss", ">after step", "behind the best")
    for entry in sweep.results():
        shown.add_row(*_row(entry))
    out.print(shown)
    out.print(f"[bold]{escape(sweep.sentence())}[/]")
    if report is not None:
        out.print(f"Curves: {escape(str(report))}", soft_wrap=True)
    if sweep.is_finished:
        out.print(f"Score the best:  finetune eval {escape(sweep.results()[0].run)}", soft_wrap=True)
    return 0


def _row(entry: ArmResult) -> list[str]:
    from finetune.sweep.sweep import label

    loss = "-" if entry.loss is None else f"{entry.loss:.4f}"
    gap = entry.behind
    behind = "" if gap is None else f"{gap.value:+.4f} ({gap.low:+.4f} to {gap.high:+.4f})"
    state = entry.state if entry.dropped_at is None else f"dropped at {entry.dropped_at:,}"
    return [escape(label(entry.values)), state, f"{entry.step or 0:,}", loss, f"{entry.loss_step or 0:,}", behind]


def _report(sweep: Sweep) -> Path | None:
    """The sweep's page with curves, written by the page's own code; None where it can't be."""
    from finetune.cli.ui import page_command

    target = sweep.path / "report.html"
    command = [*page_command(".sweep_report"), str(sweep.path), str(target)]
    process = subprocess.run(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, check=False)
    return target if process.returncode == 0 else None
