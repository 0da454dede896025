"""`finetune doctor`: checks of this machine, each with a fix."""

from __future__ import annotations

import time

from rich.markup import escape

from finetune import __version__
from finetune.cli.output import print_json
from finetune.cli.render import out, show_progress
from finetune.cli.source import recipe_of

_COLOURS = {"ok": "green", "skip": "dim", "warn": "yellow", "fail": "bold red"}


def show_doctor(
    source: str | None, overrides: list[str], *, model: str | None = None, data: str | None = None, as_json: bool
) -> int:
    """Check the machine, and a recipe's needs if one is given. Returns 1 when a check fails, else 0."""
    recipe = recipe_of(source, overrides, model=model, data=data) if source or model or data else None
    from finetune.doctor import examine, worst
    from finetune.model.configuration import named_model

    recipe = named_model(recipe)[0] if recipe else None

    began = time.monotonic()
    with show_progress(quiet=as_json) as progress:
        progress("checking")
        findings = examine(recipe, progress)
    state, took_s = worst(findings), round(time.monotonic() - began, 1)
    if as_json:
        values = {"finetune": __version__, "state": state, "took_s": took_s}
        print_json({**values, "findings": [finding.as_json() for finding in findings]})
    else:
        for finding in findings:
            shown = finding.as_json()
            colour = _COLOURS[finding.state]
            out.print(f"[{colour}]{finding.state:4}[/]  [bold]{finding.check}[/]: {escape(shown['what'])}", soft_wrap=True)
            if finding.fix:
                out.print(f"      [dim]fix:[/] {escape(shown['fix'])}", soft_wrap=True)
    return 1 if state == "fail" else 0
