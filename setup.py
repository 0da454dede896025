"""Everything is in pyproject.toml but this: the recipes, which stand at the top of the tree, go into the package."""

from __future__ import annotations

from pathlib import Path

from setuptools import setup
from setuptools.command.build_py import build_py


class BuildWithRecipes(build_py):
    """Copies recipes/*.yaml to finetune/recipes, where an installed finetune looks for them."""

    def run(self) -> None:
        """Build the packages, then the recipes beside them; an editable install finds the checkout's own."""
        super().run()
        if self.editable_mode:
            return
        target = Path(self.build_lib) / "finetune" / "recipes"
        target.mkdir(parents=True, exist_ok=True)
        for recipe in sorted(Path(__file__).parent.joinpath("recipes").glob("*.yaml")):
            self.copy_file(str(recipe), str(target / recipe.name))


setup(cmdclass={"build_py": BuildWithRecipes})
