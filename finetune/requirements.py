"""Installed versions, checked against finetune's package metadata."""

from __future__ import annotations

import contextlib
from collections.abc import Collection
from dataclasses import dataclass
from importlib import metadata

from packaging.requirements import Requirement

from finetune.errors import PackagesError

DISTRIBUTION = "finetune-forecast"  # the name to install: `finetune` on PyPI is another project


@dataclass(frozen=True)
class Package:
    """A requirement and its installed version."""

    requirement: Requirement
    installed: str | None

    @property
    def is_supported(self) -> bool:
        return self.installed is not None and self.requirement.specifier.contains(self.installed, prereleases=True)

    def __str__(self) -> str:
        return f"{self.requirement.name} {self.installed or 'is missing'}, needed {self.requirement.specifier}"


def installed_version(name: str) -> str | None:
    """Return an installed package's version, or None."""
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return None


def packages(extra: str = "") -> list[Package]:
    """Return finetune's requirements, including an extra's."""
    requirements = []  # stays empty in a checkout without `pip install`
    with contextlib.suppress(metadata.PackageNotFoundError):
        requirements = [Requirement(text) for text in metadata.requires(DISTRIBUTION) or []]
    needed = [entry for entry in requirements if entry.marker is None or entry.marker.evaluate({"extra": extra})]
    return [Package(entry, installed_version(entry.name)) for entry in needed]


def how_to_install(unusable: list[Package]) -> str:
    """Return the pip command for these packages."""
    return "pip install " + " ".join(f"'{package.requirement.name}{package.requirement.specifier}'" for package in unusable)


def refuse_other_versions(names: Collection[str]) -> None:
    """Raise PackagesError if a package is missing or unsupported."""
    if unsupported := [package for package in packages() if package.requirement.name in names and not package.is_supported]:
        fix = f"Forecasts hold for supported versions only. Run: {how_to_install(unsupported)}"
        raise PackagesError([str(package) for package in unsupported], fix)


def refuse_missing_extra(extra: str, subject: str) -> None:
    """Raise PackagesError if packages of an extra are missing."""
    if missing := [package for package in packages(extra=extra) if package.installed is None]:
        names = ", ".join(package.requirement.name for package in missing)
        problem = f"{subject} needs {names}, which is not installed (the extra '{extra}' of {DISTRIBUTION})"
        raise PackagesError(problem, f"Install it: {how_to_install(missing)}")
