"""The installed stack against the versions that this version of finetune was made for."""

from __future__ import annotations

import sys
from importlib.metadata import PackageNotFoundError

from finetune import __version__
from finetune.doctor.finding import Finding
from finetune.requirements import how_to_install, packages


def check_packages(requirements: list[str] | None = None) -> Finding:
    """Is each dependency installed, in a version that the forecast knows? `requirements` as in a package's metadata."""
    try:
        wanted = packages(requirements)
    except PackageNotFoundError:
        fix = "Install it: pip install -e . in the checkout, or uv tool install finetune."
        return Finding("packages", "warn", "finetune is run from its source and not installed; its versions are unchecked", fix)
    found = {package.requirement.name: package.installed for package in wanted}
    python = sys.version.split()[0]
    facts = {"finetune": __version__, "python": python, **found}
    wrong = [package for package in wanted if not package.fits]
    if not wrong:
        what = f"finetune {__version__}, python {python}, torch {found.get('torch')}, transformers {found.get('transformers')}"
        return Finding("packages", "ok", what, facts=facts)
    return Finding("packages", "fail", "; ".join(map(str, wrong)), how_to_install(wrong), facts)
