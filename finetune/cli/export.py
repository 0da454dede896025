"""`finetune export`, `merge` and `push`."""

from __future__ import annotations

import sys
from pathlib import Path

from rich.markup import escape

from finetune.cli.output import print_json
from finetune.cli.render import out, show_progress, table
from finetune.cli.source import option_bytes
from finetune.errors import CommandError
from finetune.files import to_json
from finetune.planner.plan import read_plan
from finetune.run.card import restrict_visible_devices
from finetune.run.directory import open_run
from finetune.units import format_bytes


def export_run(
    source: str, *, to: str, kind: str, llama_cpp: str, output: str | None, rows: int, data: str | None, as_json: bool
) -> None:
    """Export a run to GGUF."""
    run = open_run(source)
    from finetune.export.parity import require_llama_cpp

    checkout = Path(llama_cpp).expanduser()
    require_llama_cpp(checkout)  # before minutes of merging
    restrict_visible_devices(run)
    from finetune.export.gguf import export_gguf

    with show_progress(quiet=as_json) as progress:
        exported = export_gguf(run, Path(output) if output else None, gguf_type=kind, separate=to == "gguf-adapter",
                           llama_cpp=checkout, rows=rows, data=data, progress=progress)  # fmt: skip
    if as_json:
        print_json({"run": str(run.path), "type": kind, **to_json(exported)})
        return
    parity = exported.check
    out.print(f"[bold]{escape(str(exported.file))}[/]")
    out.print(
        f"llama.cpp: token ids of {parity.prompts:,} prompts and {parity.conversations:,} conversations match the training's, "
        f"{parity.same_answers:,} of {parity.rows:,} answers match the adapter's"
    )
    adapter = f" --lora {escape(str(exported.adapter))}" if exported.adapter else ""
    out.print(f"[dim]llama-server --model {escape(str(exported.file))}{adapter} --jinja[/]", soft_wrap=True)
    if exported.modelfile:
        name = run.path.resolve().name.lower()
        out.print(f"[dim]ollama create {escape(name)} -f {escape(str(exported.modelfile))}[/]", soft_wrap=True)
    else:
        out.print(f"no Modelfile: {escape(str(exported.why_no_modelfile))}")


def merge_run(source: str, *, output: str | None, max_shard_size: str | None, as_json: bool) -> None:
    """Merge a run's adapter."""
    run = open_run(source)
    restrict_visible_devices(run)
    from finetune.export.merge import merge

    max_shard_bytes = option_bytes("--max-shard-size", max_shard_size)
    if max_shard_bytes is not None and max_shard_bytes < 2**20:  # the unit is missing, or the model would be thousands of files
        raise CommandError(f"--max-shard-size {max_shard_size} is less than 1 MiB", "For example --max-shard-size 5GB")
    with show_progress(quiet=False) as progress:
        folder = merge(run, Path(output) if output else None, max_shard_bytes=max_shard_bytes, progress=progress)
    if as_json:
        print_json({"run": str(run.path), "merged": str(folder)})
        return
    out.print(f"merged model in {escape(str(folder))}")
    if read_plan(run.plan).settings.requested_formats:
        out.print("trained on quantised weights, merged into 16-bit weights: some answers may change")


def push_run(
    source: str, repo: str, *, adapter: bool, merged: bool, gguf: list[str], public: bool, update: bool, dry_run: bool,
    yes: bool, as_json: bool,
) -> None:  # fmt: skip
    """List the files, and push them after a confirmation."""
    if adapter + merged + bool(gguf) > 1:
        raise CommandError("--adapter, --merged and --gguf can't be combined", "Push each to a separate repository.")
    # a script must not wait for a confirmation; stdin is None if the parent closed the stream
    if not (dry_run or yes) and (as_json or sys.stdin is None or not sys.stdin.isatty()):
        raise CommandError("the push needs a confirmation from a terminal", "See the files with --dry-run, then add --yes.")
    from finetune.export.push import files_to_send, push
    from finetune.hub import require_repo_id

    require_repo_id(repo)
    run, kind = open_run(source), "merged" if merged else "gguf" if gguf else "adapter"
    files = files_to_send(run, kind, gguf)
    total_bytes, visibility = sum(file.size_bytes for file in files), "public" if public else "private"
    if not as_json:
        shown = table("file", ">size")
        for file in files:
            shown.add_row(escape(file.name), format_bytes(file.size_bytes))
        out.print(shown)
        out.print(f"{len(files)} files, {format_bytes(total_bytes)}, for {escape(repo)} ({visibility})")
    values = {"run": str(run.path), "repo": repo, "kind": kind, "public": public, "bytes": total_bytes}
    values["files"] = [{"name": file.name, "bytes": file.size_bytes} for file in files]
    if dry_run:
        if as_json:
            print_json({**values, "sent": False})
        else:
            out.print("dry run: nothing was sent")
        return
    if not yes:
        print(f"Push them? The repository will be {visibility}. [y/N] ", end="", flush=True)
        if sys.stdin.readline().strip().lower() not in ("y", "yes"):
            out.print("nothing was sent")
            return
    with show_progress(quiet=as_json) as progress:
        address = push(repo, files, public=public, update=update, progress=progress)
    if as_json:
        print_json({**values, "sent": True, "commit": address})
    else:
        out.print(f"pushed: {escape(address)}", soft_wrap=True)
