"""`finetune doctor` and `cache`."""

from __future__ import annotations

import shutil

from rich.markup import escape

from finetune import __version__
from finetune.cli.output import print_json
from finetune.cli.render import out, show_progress, table
from finetune.cli.source import recipe_of
from finetune.errors import CommandError, DiskFull
from finetune.units import format_bytes

_COLOURS = {"ok": "green", "skip": "dim", "warn": "yellow", "fail": "bold red"}


def show_doctor(
    source: str | None, overrides: list[str], *, model: str | None, data: str | None, measure: bool = False, as_json: bool
) -> int:
    """Check the machine, or `measure` its rates."""
    recipe = recipe_of(source, overrides, model=model, data=data) if source or model or data else None
    from finetune.doctor import examine, worst
    from finetune.recipe.complete import named_model, read_base_adapter

    with show_progress(quiet=as_json) as progress:
        progress("checking")
        if measure:
            from finetune.doctor.rates import measure_rates

            findings = measure_rates(progress)
        else:
            if recipe:
                recipe, _ = named_model(recipe)
            if recipe and recipe.adapter_name_or_path:
                read_base_adapter(recipe.adapter_name_or_path)  # raises if it is missing
            findings = examine(recipe, progress)
    state = worst(findings)
    findings_json = [finding.as_json() for finding in findings]  # without the user's name
    if as_json:
        print_json({"finetune": __version__, "state": state, "findings": findings_json})
    else:
        shown = table("", "")
        shown.show_header = False
        for values in findings_json:
            fix = f"\n[dim]fix:[/] {escape(values['fix'])}" if values["fix"] else ""
            state_in_colour = f"[{_COLOURS[values['state']]}]{values['state']}[/]"
            shown.add_row(state_in_colour, f"[bold]{values['check']}[/]: {escape(values['what'])}{fix}")
        out.print(shown)
    return 1 if state == "fail" else 0


def use_cache(verb: str, *, as_json: bool) -> None:
    """Show or clear the caches. Raises DiskFull."""
    if verb not in ("list", "clear"):
        raise CommandError(f"finetune cache {verb}: unknown", "Use: finetune cache, or finetune cache clear.")
    from finetune.data.pictures.source import pictures_folder
    from finetune.data.token_cache import cache_folder

    caches = {"tokenised rows": cache_folder(), "images": pictures_folder()}
    must_clear, content = verb == "clear", {}
    for name, folder in caches.items():
        # measured before it is cleared: the report says what was deleted
        size_bytes = sum(file.stat().st_size for file in folder.rglob("*") if file.is_file())
        content[name] = {"folder": str(folder), "bytes": size_bytes}
        try:
            if must_clear and folder.exists():
                shutil.rmtree(folder)
        except OSError as error:
            raise DiskFull(f"{error.filename or folder} can't be deleted: {error.strerror}", "Check its permissions.") from None
        if not as_json:
            line = f"{name}, {format_bytes(size_bytes)}, in {folder}"
            out.print(escape(f"cleared: {line}" if must_clear else line), soft_wrap=True)
    if as_json:
        print_json({"caches": content, "cleared": must_clear})
    elif not must_clear:
        out.print("To delete them:  finetune cache clear")
