"""`finetune merge`: base and adapter as one model."""

from __future__ import annotations

from pathlib import Path

from rich.markup import escape

from finetune.cli.app import print_json
from finetune.cli.render import doing, out
from finetune.run.directory import open_run


def merge_run(source: str, *, output: str | None, as_json: bool) -> None:
    """Merge a finished run's adapter and print the model's folder."""
    run = open_run(source)
    from finetune.export.merge import merge

    with doing(quiet=as_json) as say:
        folder = merge(run, Path(output) if output else None, progress=say)
    if as_json:
        print_json({"run": str(run.path), "merged": str(folder)})
    else:
        out.print(f"merged model in {escape(str(folder))}")
