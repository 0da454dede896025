"""Installed package versions, checked against finetune's own requirements (its package metadata)."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from importlib import metadata

from packaging.requirements import Requirement

from finetune.errors import PackagesError

#: The name to install: `finetune` on PyPI is another project.
DISTRIBUTION = "finetune-forecast"


@dataclass(frozen=True)
class Package:
    """A requirement and the installed version, None when it is missing."""

    requirement: Requirement
    installed: str | None

    @property
    def fits(self) -> bool:
        """Whether the installed version is within the requirement's bounds."""
        return self.installed is not None and self.requirement.specifier.contains(self.installed, prereleases=True)

    def __str__(self) -> str:
        return f"{self.requirement.name} {self.installed or 'is missing'}, needed {self.requirement.specifier}"


def installed_version(name: str) -> str | None:
    """Version of an installed package, without importing it; None when it is missing."""
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return None


def packages(extra: str = "") -> list[Package]:
    """Each requirement of finetune for this platform and `extra` with its installed version.

    Raises importlib.metadata.PackageNotFoundError when finetune is run from its source and not installed.
    """
    parsed = [Requirement(text) for text in metadata.requires(DISTRIBUTION) or []]
    needed = [item for item in parsed if item.marker is None or item.marker.evaluate({"extra": extra})]
    return [Package(item, installed_version(item.name)) for item in needed]


def how_to_install(wrong: list[Package]) -> str:
    """The command that installs the right versions."""
    return "pip install " + " ".join(f"'{package.requirement.name}{package.requirement.specifier}'" for package in wrong)


def refuse_other_versions(names: Collection[str]) -> None:
    """Raise PackagesError when one of these packages is missing or out of bounds; finetune must be installed to have bounds."""
    try:
        wrong = [package for package in packages() if package.requirement.name in names and not package.fits]
    except metadata.PackageNotFoundError:
        return
    if wrong:
        fix = f"Forecasts are valid only for supported versions. Type: {how_to_install(wrong)}"
        raise PackagesError([str(package) for package in wrong], fix)


def refuse_missing_extra(extra: str, subject: str) -> None:
    """Raise PackagesError, which begins with `subject`, when packages of an extra such as `ui` are not installed."""
    try:
        missing = [package for package in packages(extra=extra) if package.installed is None]
    except metadata.PackageNotFoundError:
        return
    if missing:
        names = ", ".join(package.requirement.name for package in missing)
        problem = f"{subject} needs {names}, which is not installed (the extra '{extra}' of {DISTRIBUTION})"
        raise PackagesError(problem, f"Install it: {how_to_install(missing)}")
