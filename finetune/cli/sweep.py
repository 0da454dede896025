"""`finetune sweep`."""

from __future__ import annotations

import math
import os
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.markup import escape

from finetune.card.visible import hide_gpus
from finetune.cli.output import print_json
from finetune.cli.render import err, out, show_progress, table
from finetune.cli.source import recipe_of, require_dataset
from finetune.cli.ui import page_command
from finetune.errors import STOPPED, CommandError, RecipeError
from finetune.recipe import load_changes
from finetune.settings import Recipe
from finetune.sweep import JOURNAL, LOCK, RULE, Sweep, create_sweep, label, open_sweep, train_arms
from finetune.system import take_lock
from finetune.units import format_seconds

_MOST_ARMS = 64  # more arms are a typing error


def sweep_command(
    source: str | None, overrides: list[str], *, model: str | None, data: str | None, show: bool, as_json: bool,
    alone: bool = False,
) -> int:  # fmt: skip
    """Start, continue or show a sweep."""
    if alone:  # else planning the arms opens a CUDA context
        hide_gpus()
    folders = [path for path in (Path(source), Path("runs") / source) if (path / JOURNAL).is_file()] if source else []
    if folders:
        if overrides:
            raise CommandError("the settings of a sweep can't change", "Start a new sweep: finetune sweep RECIPE")
        sweep = open_sweep(folders[0])
    elif show:
        raise CommandError(f"{source} is not a sweep", f"Give the folder of a sweep, which has a {JOURNAL}.")
    else:
        sweep = _create(source, overrides, model=model, data=data, quiet=as_json)
        if not as_json:
            _print_arms(sweep)
    if not (show or sweep.is_finished):
        try:
            _train(sweep.path, err if as_json else out)
        except KeyboardInterrupt:
            err.print(f"stopped. To continue:  finetune sweep {escape(str(sweep.path))}", soft_wrap=True)
            return STOPPED[0]
    return _print_result(sweep, as_json)


def _create(source: str | None, overrides: list[str], *, model: str | None, data: str | None, quiet: bool) -> Sweep:
    if source and "=" in source and not Path(source).exists():  # finetune sweep --model X learning_rate=1e-4,2e-4
        overrides, source = [source, *overrides], None

    def parse(changes: list[str]) -> Recipe:
        return recipe_of(source, changes, model=model, data=data)

    fixed, swept = split_overrides(overrides, parse)
    require_dataset(parse(fixed))

    def arm_recipe(values: dict[str, Any]) -> Recipe:
        return parse([*fixed, *(f"{name}={value}" for name, value in values.items())])

    with show_progress(quiet=quiet) as progress:
        return create_sweep(arm_recipe, swept, progress=progress)


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


def _train(path: Path, console: Console) -> None:
    lock = take_lock(path / LOCK, wait_s=1)
    if lock is None:
        raise CommandError(f"{path} is running in another process", f"See how far it is: finetune sweep {path} --show")
    try:
        journal = path / JOURNAL
        # a full disk can leave half a line, which the next line would extend
        os.truncate(journal, journal.read_bytes().rfind(b"\n") + 1)
        train_arms(open_sweep(path), lambda line: console.print(escape(line), soft_wrap=True))
    finally:
        lock.release()


def _print_arms(sweep: Sweep) -> None:
    arms, facts = sweep.study.trials, sweep.study.user_attrs
    out.print(f"[bold]{escape(str(sweep.path))}[/]: {len(arms)} arms, {facts['steps']:,} steps each")
    for arm in arms:
        out.print(f"  {escape(label(arm.params))}")
    for entry in facts["left_out"]:
        out.print(f"  [yellow]left out:[/] {escape(label(entry['values']))}: {escape(entry['reason'])}")
    out.print(f"They train in this order, with the same seed, rows and order of rows. {RULE}")
    all_s = facts["forecast_s"]
    out.print(f"Time of all steps: {'not known' if all_s is None else f'about {format_seconds(all_s)}'}\n")


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
