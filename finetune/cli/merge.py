"""`finetune merge`: base and adapter as one model."""

from __future__ import annotations

from pathlib import Path

from rich.markup import escape

from finetune.cli.app import print_json
from finetune.cli.render import doing, out
from finetune.errors import CommandError
from finetune.run.directory import open_run
from finetune.units import parse_bytes


def merge_run(source: str, *, output: str | None, max_shard_size: str | None, as_json: bool) -> None:
    """Merge a finished run's adapter and print the model's folder."""
    run = open_run(source)
    from finetune.export.merge import merge

    most = _bytes(max_shard_size)
    with doing(quiet=False) as say:
        folder = merge(run, Path(output) if output else None, max_shard_bytes=most, progress=say)
    if as_json:
        print_json({"run": str(run.path), "merged": str(folder)})
    else:
        out.print(f"merged model in {escape(str(folder))}")


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
