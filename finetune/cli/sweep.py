"""`finetune sweep`."""

from __future__ import annotations

import functools
import math
import os
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import IO, Any

from rich.markup import escape

from finetune.card.visible import environment_with_gpus, hide_gpus
from finetune.cli.output import print_json
from finetune.cli.render import err, out, show_progress, table
from finetune.cli.source import recipe_of, require_dataset
from finetune.cli.ui import page_command
from finetune.errors import FAILED, FINISHED, STOPPED, CommandError, FinetuneError, RecipeError
from finetune.privacy import keep_private
from finetune.recipe.load import load_changes
from finetune.settings import Recipe
from finetune.sweep.sweep import JOURNAL, LOCK, LOG, RULE, STOP, Sweep, create_sweep, label, open_sweep, train_arms
from finetune.system import caught_interrupts, ignore_hangup, start_detached, take_lock
from finetune.units import format_seconds

_POLL_S = 0.3  # seconds between two looks at a sweep
_START_S = 60.0  # seconds that the detached process gets to start
_UNITS_S = {"s": 1.0, "m": 60.0, "h": 3600.0, "d": 86400.0}
_MOST_ARMS = 64  # more arms are a typing error


def sweep_command(
    source: str | None, overrides: list[str], *, model: str | None, data: str | None, budget: str | None, detach: bool,
    stop: bool, show: bool, as_json: bool, alone: bool = False,
) -> int:  # fmt: skip
    """Start, continue, stop or show a sweep."""
    if alone:  # else planning the arms opens a CUDA context
        hide_gpus()
    folders = [path for path in (Path(source), Path("runs") / source) if (path / JOURNAL).is_file()] if source else []
    if folders:
        if overrides or budget:
            raise CommandError("the settings of a sweep can't change", "Start a new sweep: finetune sweep RECIPE")
        sweep = open_sweep(folders[0])
        if stop and sweep.is_running:
            (sweep.path / STOP).touch()  # the training process polls for it
            while sweep.is_running:
                time.sleep(_POLL_S)
        if stop:
            return _print_state(sweep, as_json)
    elif stop or show:
        raise CommandError(f"{source} is not a sweep", f"Give the folder of a sweep, which has a {JOURNAL}.")
    else:
        sweep = _create(source, overrides, model=model, data=data, budget=budget, quiet=as_json)
        if not as_json:
            _print_arms(sweep)
    if show or sweep.is_finished:
        return _print_result(sweep, as_json)
    log = sweep.path / LOG
    log.touch()
    with log.open(encoding="utf-8", errors="replace") as log_lines:
        log_lines.seek(0, os.SEEK_END)  # skips the lines of an earlier process
        if not sweep.is_running:
            _start(sweep, log)
        return _print_state(sweep, as_json) if detach else _follow(sweep, log_lines, as_json)


def _create(
    source: str | None, overrides: list[str], *, model: str | None, data: str | None, budget: str | None, quiet: bool
) -> Sweep:
    if source and "=" in source and not Path(source).exists():  # finetune sweep --model X learning_rate=1e-4,2e-4
        overrides, source = [source, *overrides], None

    def parse(changes: list[str]) -> Recipe:
        return recipe_of(source, changes, model=model, data=data)

    fixed, swept = split_overrides(overrides, parse)
    budget_s = _parse_duration_s(budget) if budget else None
    require_dataset(parse(fixed))

    def arm_recipe(values: dict[str, Any]) -> Recipe:
        return parse([*fixed, *(f"{name}={value}" for name, value in values.items())])

    with show_progress(quiet=quiet) as progress:
        return create_sweep(arm_recipe, swept, budget_s=budget_s, progress=progress)


def split_overrides(overrides: list[str], parse: Callable[[list[str]], Recipe]) -> tuple[list[str], dict[str, list[Any]]]:
    """Return the fixed overrides, and the values to try by setting. Raises RecipeError."""
    fixed, swept = [], {}
    for override in overrides:
        name, _, text = override.partition("=")
        # a list such as target_modules=q_proj,v_proj is one value
        if "," not in text or not text.strip("[], \t\r\n") or _is_valid(override, parse):
            fixed.append(override)
            continue
        value_texts = [part.strip() for part in text.strip().strip("[]").split(",") if part.strip()]
        changes = [load_changes([f"{name}={value_text}"]) for value_text in value_texts]
        setting = next(iter(changes[0]))  # an alias is replaced by the setting's name
        values = [getattr(parse([f"{setting}={change[setting]}"]), setting) for change in changes]
        are_numbers = all(isinstance(value, (int, float)) for value in values)
        swept[setting] = sorted(set(values)) if are_numbers else [*dict.fromkeys(values)]
    arm_count = math.prod(map(len, swept.values()))
    if arm_count > _MOST_ARMS:
        raise CommandError(f"{arm_count:,} combinations are more than {_MOST_ARMS}", "Give fewer values.")
    return fixed, swept


def _is_valid(override: str, parse: Callable[[list[str]], Recipe]) -> bool:
    try:
        parse([override])
    except RecipeError:
        return False
    return True


def _parse_duration_s(text: str) -> float:
    number, unit = text[:-1], text[-1:]
    try:
        seconds = float(number) * _UNITS_S[unit]
    except (ValueError, KeyError):
        seconds = 0.0
    if not seconds > 0:  # NaN, too
        raise CommandError(f"--budget {text[:20]!r} is not a duration", "Give a number and s, m, h or d, such as 3h or 90m.")
    return seconds


def _start(sweep: Sweep, log: Path) -> None:
    (sweep.path / STOP).unlink(missing_ok=True)
    with log.open("ab") as output:
        # -P: modules in the working directory don't shadow imports
        command = [sys.executable, "-P", "-m", "finetune.cli.sweep", str(sweep.path)]
        process = start_detached(command, output, env=environment_with_gpus())
    deadline_s = time.monotonic() + _START_S
    while not sweep.is_running and process.poll() is None and time.monotonic() < deadline_s:
        time.sleep(0.05)


def main() -> int:
    """Train the arms in the detached process."""
    keep_private()
    ignore_hangup()
    path = Path(sys.argv[1])
    lock = take_lock(path / LOCK, wait_s=1)
    if lock is None:  # another process drives this sweep
        return FAILED
    try:
        journal = path / JOURNAL
        # a full disk can leave half a line, which the next line would extend
        os.truncate(journal, journal.read_bytes().rfind(b"\n") + 1)
        train_arms(open_sweep(path), functools.partial(print, flush=True))
    except (FinetuneError, OSError) as error:
        print(f"the sweep has stopped: {error}. To continue: finetune sweep {path}")
        return FAILED
    return FINISHED


def _follow(sweep: Sweep, log_lines: IO[str], as_json: bool) -> int:
    stop_request = sweep.path / STOP
    with caught_interrupts() as interrupts:
        while True:
            is_running = sweep.is_running  # read before the log: no last line is missed
            if not as_json:
                out.print(escape(log_lines.read()), end="", soft_wrap=True)
            if not is_running:
                break
            if interrupts and not stop_request.exists():
                err.print("[yellow]stopping after this step, with a checkpoint[/]")
                stop_request.touch()
            time.sleep(_POLL_S)
    if sweep.is_finished:
        return _print_result(sweep, as_json)
    return _print_state(sweep, as_json) or (STOPPED[0] if interrupts else FAILED)


def _print_arms(sweep: Sweep) -> None:
    arms, facts = sweep.study.trials, sweep.study.user_attrs
    out.print(f"[bold]{escape(str(sweep.path))}[/]: {len(arms)} arms, {facts['steps']:,} steps each")
    for arm in arms:
        out.print(f"  {escape(label(arm.params))}")
    for entry in facts["left_out"]:
        out.print(f"  [yellow]left out:[/] {escape(label(entry['values']))}: {escape(entry['reason'])}")
    out.print(f"They train in this order, with the same seed, rows and order of rows. {RULE}")
    time_text = "not measured here" if facts["forecast_s"] is None else f"about {format_seconds(facts['forecast_s'])} at most"
    out.print(f"Time: {time_text}\n")


def _print_state(sweep: Sweep, as_json: bool) -> int:
    if as_json:
        print_json(sweep.as_json())
    else:
        state = "running" if sweep.is_running else "paused"
        out.print(f"{state}: {escape(sweep.sentence())}")
        out.print(f"To continue or follow it:  finetune sweep {escape(str(sweep.path))}", soft_wrap=True)
    return 0


def _print_result(sweep: Sweep, as_json: bool) -> int:
    report = sweep.path / "report.html"
    command = [*page_command(".report"), str(report), str(sweep.path)]
    process = subprocess.run(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, check=False)
    if as_json:
        print_json({**sweep.as_json(), "report": None if process.returncode else str(report)})
        return 0
    shown = table("arm", "state", ">steps", ">held-out loss", ">after step", "behind the best")
    for entry in sweep.results():
        loss = "-" if entry.loss is None else f"{entry.loss:.4f}"
        loss_step = "-" if entry.loss_step is None else f"{entry.loss_step:,}"
        gap = entry.behind
        behind = "" if gap is None else f"{gap.value:+.4f} ({gap.low:+.4f} to {gap.high:+.4f})"
        state = entry.state if entry.dropped_at is None else f"dropped at {entry.dropped_at:,}"
        shown.add_row(escape(label(entry.values)), state, f"{entry.step or 0:,}", loss, loss_step, behind)
    out.print(shown)
    out.print(f"[bold]{escape(sweep.sentence())}[/]")
    if not process.returncode:
        out.print(f"Curves: {escape(str(report))}", soft_wrap=True)
    if sweep.is_finished:
        out.print(f"Score the best:  finetune eval {escape(sweep.results()[0].run)}", soft_wrap=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
