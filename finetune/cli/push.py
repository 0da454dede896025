"""`finetune push`: a run's model in a repository of the hub."""

from __future__ import annotations

import sys

from rich.markup import escape

from finetune.cli.output import print_json
from finetune.cli.render import out, show_progress, table
from finetune.errors import CommandError
from finetune.run.directory import open_run
from finetune.units import format_bytes


def push_run(
    source: str, repo: str, *, merged: bool, gguf: list[str], public: bool, update: bool, dry_run: bool, yes: bool,
    as_json: bool,
) -> None:  # fmt: skip
    """List the files with their sizes, and send them when that is confirmed."""
    if merged and gguf:
        raise CommandError("--merged and --gguf are two kinds of model", "Push them to two repositories.")
    if not (dry_run or yes) and (as_json or sys.stdin is None or not sys.stdin.isatty()):
        raise CommandError("nobody is there to confirm the push", "See the files with --dry-run, then add --yes.")
    from finetune.export.push import files_to_send, push
    from finetune.hub import require_repo

    require_repo(repo)
    run, kind = open_run(source), "merged" if merged else "gguf" if gguf else "adapter"
    files = files_to_send(run, kind, gguf)
    total, seen = sum(file.size for file in files), "public" if public else "private"
    if not as_json:
        shown = table("file", ">size")
        for file in files:
            shown.add_row(escape(file.name), format_bytes(file.size))
        out.print(shown)
        out.print(f"{len(files)} files, {format_bytes(total)}, for {escape(repo)} ({seen})")
    values = {"run": str(run.path), "repo": repo, "kind": kind, "public": public, "bytes": total}
    listed = [{"name": file.name, "bytes": file.size} for file in files]
    if dry_run:
        if as_json:
            print_json({**values, "files": listed, "sent": False})
        else:
            out.print("nothing was sent: it is a dry run")
        return
    if not yes:
        print(f"Push them? The repository will be {seen}. [y/N] ", end="", flush=True)
        if sys.stdin.readline().strip().lower() not in ("y", "yes"):
            out.print("nothing was sent")
            return
    with show_progress(quiet=as_json) as progress:
        address = push(repo, files, public=public, update=update, progress=progress)
    if as_json:
        print_json({**values, "files": listed, "sent": True, "commit": address})
    else:
        out.print(f"pushed: {escape(address)}", soft_wrap=True)
