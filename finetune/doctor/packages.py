"""The installed stack against the versions that this version of finetune was made for."""

from __future__ import annotations

import sys
from importlib import metadata

from packaging.requirements import Requirement

from finetune import __version__
from finetune.doctor.finding import Finding


def check_packages(requirements: list[str] | None = None) -> Finding:
    """Is each dependency installed, in a version that the forecast knows? `requirements` as in a package's metadata."""
    try:
        wanted = requirements if requirements is not None else metadata.requires("finetune") or []
    except metadata.PackageNotFoundError:
        fix = "Install it: pip install -e . in the checkout, or uv tool install finetune."
        return Finding("packages", "warn", "finetune is run from its source and not installed; its versions are unchecked", fix)
    found: dict[str, str | None] = {}
    wrong: list[Requirement] = []
    for requirement in map(Requirement, wanted):
        if requirement.marker is not None and not requirement.marker.evaluate({"extra": ""}):
            continue
        found[requirement.name] = installed = _version(requirement.name)
        if installed is None or not requirement.specifier.contains(installed, prereleases=True):
            wrong.append(requirement)
    python = sys.version.split()[0]
    facts = {"finetune": __version__, "python": python, **found}
    if not wrong:
        what = f"finetune {__version__}, python {python}, torch {found.get('torch')}, transformers {found.get('transformers')}"
        return Finding("packages", "ok", what, facts=facts)
    lines = [f"{item.name} {found[item.name] or 'is missing'}, needed {item.specifier}" for item in wrong]
    fix = "pip install " + " ".join(f"'{item.name}{item.specifier}'" for item in wrong)
    return Finding("packages", "fail", "; ".join(lines), fix, facts)


def _version(name: str) -> str | None:
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return None
