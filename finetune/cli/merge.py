"""`finetune merge`: base and adapter as one model."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path

from rich.markup import escape

from finetune.cli.output import print_json
from finetune.cli.render import out, show_progress
from finetune.cli.visible_devices import restrict_visible_devices
from finetune.errors import CommandError
from finetune.planner.plan import read_plan
from finetune.run.card import restrict_visible_devices
from finetune.run.directory import open_run
from finetune.settings.base_formats import requested_formats
from finetune.units import parse_bytes


def merge_run(source: str, *, output: str | None, max_shard_size: str | None, check: int, as_json: bool) -> None:
    """Merge a finished run's adapter and print the model's folder; with `check`, what that changes on so many held-out rows."""
    run = open_run(source)
    restrict_visible_devices(run)
    from finetune.export.merge import merge

    most = _bytes(max_shard_size)
    changed = None
    with show_progress(quiet=False) as progress:
        folder = merge(run, Path(output) if output else None, max_shard_bytes=most, progress=progress)
        if check:
            from finetune.export.merge_effect import measure_merge_effect

            changed = measure_merge_effect(run, folder, check, progress)
    if as_json:
        print_json({"run": str(run.path), "merged": str(folder), **({"check": asdict(changed)} if changed else {})})
        return
    out.print(f"merged model in {escape(str(folder))}")
    settings = read_plan(run.plan).settings
    if changed:
        loss = f"; loss {changed.loss:.4f} before, {changed.merged_loss:.4f} merged" if changed.loss is not None else ""
        out.print(f"answers changed by merging: {changed.answers_changed:,} of {changed.rows:,}{loss}")
    elif requested_formats(settings):
        out.print("trained on quantised weights, merged into 16-bit ones: --check 20 shows how many answers that changes")


def _bytes(text: str | None) -> int | None:
    if text is None:
        return None
    try:
        size = parse_bytes(text)
    except ValueError as error:
        raise CommandError(f"--max-shard-size: {error}", "For example --max-shard-size 5GB") from None
    if size < 2**20:
        raise CommandError(f"--max-shard-size {text} is less than 1 MiB", "For example --max-shard-size 5GB")
    return size
