"""`finetune export-launch`: a recipe as a job file for Slurm, Kubernetes or SkyPilot."""

from __future__ import annotations

from pathlib import Path

from rich.markup import escape

from finetune.cli.output import print_json
from finetune.cli.render import err, print_text
from finetune.cli.source import with_model_and_data
from finetune.errors import CommandError
from finetune.files import write_output
from finetune.recipe import load_recipe


def export_launch(
    engine: str, source: str, overrides: list[str], *, model: str | None = None, data: str | None = None,
    output: str | None, image: str, hours: int, volume: str, as_json: bool,
) -> None:  # fmt: skip
    """Write the job file to `output`, or print it."""
    from finetune.jobs import ENGINES, Job, job_file

    if engine not in ENGINES:
        raise CommandError(f"export-launch {engine}: unknown engine", f"Use {', '.join(ENGINES)}.")
    recipe = load_recipe(source, with_model_and_data(overrides, model, data))
    job = Job(recipe, name=Path(source).stem, image=image, hours=hours, volume=volume)
    text = job_file(engine, job)
    if output is None:
        print_json({"engine": engine, "name": job.label, "text": text}) if as_json else print_text(text)
        return
    path = Path(output)
    write_output(path, text, new=True)
    if as_json:
        print_json({"engine": engine, "name": job.label, "path": str(path)})
    else:
        err.print(f"{escape(str(path))} written; its first line says how to start it")
