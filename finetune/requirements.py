"""The installed packages against the versions that this version of finetune was made for, as its own metadata has them."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from importlib import metadata

from packaging.requirements import Requirement

from finetune.errors import PackagesError

#: What to do when a package that forecasts or trains has another version.
_FIX = "A forecast is only true for versions that it knows. Type: "


@dataclass(frozen=True)
class Package:
    """A requirement, and the version that is installed; None when it is missing."""

    requirement: Requirement
    installed: str | None

    @property
    def fits(self) -> bool:
        """Whether the installed version is within the requirement's bounds."""
        return self.installed is not None and self.requirement.specifier.contains(self.installed, prereleases=True)

    def __str__(self) -> str:
        return f"{self.requirement.name} {self.installed or 'is missing'}, needed {self.requirement.specifier}"


def installed_version(name: str) -> str | None:
    """Version of an installed package, not imported; None when it is missing."""
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return None


def packages(requirements: list[str] | None = None) -> list[Package]:
    """Each requirement of this platform with what is installed; without an argument finetune's own, extras left out.

    Raises importlib.metadata.PackageNotFoundError when finetune is run from its source and not installed.
    """
    wanted = requirements if requirements is not None else metadata.requires("finetune") or []
    parsed = [Requirement(text) for text in wanted]
    needed = [item for item in parsed if item.marker is None or item.marker.evaluate({"extra": ""})]
    return [Package(item, installed_version(item.name)) for item in needed]


def how_to_install(wrong: list[Package]) -> str:
    """The command that puts these packages right."""
    return "pip install " + " ".join(f"'{package.requirement.name}{package.requirement.specifier}'" for package in wrong)


def refuse_other_versions(names: Collection[str]) -> None:
    """Raise PackagesError when one of these packages is missing or outside the bounds; uninstalled source has no bounds."""
    try:
        wrong = [package for package in packages() if package.requirement.name in names and not package.fits]
    except metadata.PackageNotFoundError:
        return
    if wrong:
        raise PackagesError([str(package) for package in wrong], _FIX + how_to_install(wrong))
