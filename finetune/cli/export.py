"""`finetune export`: the tuned model as a file of another program."""

from __future__ import annotations

from pathlib import Path

from rich.markup import escape

from finetune.cli.output import print_json
from finetune.cli.render import out, show_progress
from finetune.cli.visible_devices import restrict_visible_devices
from finetune.errors import CommandError, PackagesError
from finetune.export.gguf_types import GGUF_TYPES
from finetune.run.card import restrict_visible_devices
from finetune.run.directory import open_run


def export_run(
    source: str, *, to: str, kind: str, llama_cpp: str | None, output: str | None, rows: int, data: str | None, as_json: bool
) -> None:
    """Export a run's model and print its file, what was compared, and what to type for llama.cpp and Ollama."""
    if to not in ("gguf", "gguf-adapter"):
        fix = "Use gguf or gguf-adapter; for a standard model folder: finetune merge RUN"
        raise CommandError(f"--to {to[:40]!r} is not known", fix)
    chosen = kind.lower()
    if chosen not in GGUF_TYPES:
        raise CommandError(f"--type {kind[:40]!r} is not known", f"Use one of {', '.join(GGUF_TYPES)}.")
    run = open_run(source)
    if llama_cpp is None:
        from finetune.export.parity import require_llama_cpp

        problems = ["llama.cpp's converter is needed, and --llama-cpp is not given"]
        fixes = [
            "git clone --depth 1 https://github.com/ggml-org/llama.cpp  and  --llama-cpp llama.cpp, or set FINETUNE_LLAMA_CPP"
        ]
        try:
            require_llama_cpp()
        except PackagesError as error:
            problems, fixes = [*problems, *error.problems], [*fixes, error.fix]
        raise CommandError(problems, "\n".join(fixes))
    restrict_visible_devices(run)
    from finetune.export.gguf import export_gguf

    with show_progress(quiet=as_json) as progress:
        exported = export_gguf(run, Path(output) if output else None, gguf_type=chosen, separate=to == "gguf-adapter",
                           llama_cpp=Path(llama_cpp).expanduser(), rows=rows, data=data, progress=progress)  # fmt: skip
    if as_json:
        print_json({"run": str(run.path), "type": chosen, **exported.as_json()})
        return
    parity = exported.parity
    out.print(f"[bold]{escape(str(exported.file))}[/]")
    out.print(
        f"in llama.cpp: token ids of {parity.prompts:,} prompts and {parity.conversations:,} conversations are the training's, "
        f"{parity.same_answers:,} of {parity.rows:,} answers are the adapter's"
    )
    adapter = f" --lora {escape(str(exported.adapter))}" if exported.adapter else ""
    out.print(f"[dim]llama-server --model {escape(str(exported.file))}{adapter} --jinja[/]", soft_wrap=True)
    if exported.modelfile:
        name = run.path.resolve().name.lower()
        out.print(f"[dim]ollama create {escape(name)} -f {escape(str(exported.modelfile))}[/]", soft_wrap=True)
    else:
        out.print(f"no Modelfile: {escape(str(exported.no_modelfile_reason))}")
