"""Settings: what a recipe may say, which settings agree, and what each decides; `finetune.recipe` reads files."""

from finetune.settings.resolve import Settings, plainest, resolve
from finetune.settings.schema import AUTO, DatasetRecipe, LaunchRecipe, Recipe, resolved, unresolved

__all__ = ["AUTO", "DatasetRecipe", "LaunchRecipe", "Recipe", "Settings", "plainest", "resolve", "resolved", "unresolved"]
