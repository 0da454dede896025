"""`finetune export-launch`: the same recipe as a job file of an engine that holds many cards."""

from __future__ import annotations

from pathlib import Path

from rich.markup import escape

from finetune.cli.app import print_json
from finetune.cli.render import err
from finetune.errors import RecipeError
from finetune.recipe import Recipe, load_recipe, resolved


def export_launch(
    engine: str, source: str, overrides: list[str], *, output: str | None, image: str, hours: int, volume: str, as_json: bool
) -> None:
    """Write the job file to `output`, or print it."""
    from finetune.distributed.configuration import launch_problems
    from finetune.jobs import ENGINES, Job, job_file

    if engine not in ENGINES:
        raise RecipeError(f"export-launch {engine}: this engine is not known", f"Use {', '.join(ENGINES)}.")
    recipe = load_recipe(source, overrides)
    problems = launch_problems(_with_address(recipe), on_cpu=recipe.gpu == "cpu")
    if problems:
        raise RecipeError(problems)
    job = Job(recipe, name=Path(source).stem, image=image, hours=hours, volume=volume)
    text = job_file(engine, job)
    if output is None:
        print_json({"engine": engine, "name": job.label, "text": text}) if as_json else print(text, end="")
        return
    path = Path(output)
    if path.exists():
        raise RecipeError(f"{path} exists already", "Move it away first, or give another --output.")
    path.write_text(text, encoding="utf-8")
    if as_json:
        print_json({"engine": engine, "name": job.label, "path": str(path)})
    else:
        err.print(f"{escape(str(path))} written; its first line says how to start it")


def _with_address(recipe: Recipe) -> Recipe:
    """The engine gives each machine the address; here any does."""
    if recipe.launch.num_machines == 1:
        return recipe
    return resolved(
        recipe, launch={**recipe.launch.model_dump(exclude_unset=True), "main_process_ip": "0.0.0.0", "machine_rank": 0}
    )
