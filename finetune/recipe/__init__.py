"""Recipe: what the user wants, as YAML plus overrides."""

from finetune.recipe.load import (
    find_recipe,
    load_changes,
    load_recipe,
    load_source,
    parse_recipe,
    recipe_from,
    shipped_recipes,
    write_recipe,
)
from finetune.recipe.schema import AUTO, DatasetRecipe, LaunchRecipe, Recipe, resolved, unresolved
from finetune.recipe.settings import Settings, plainest, resolve

__all__ = [
    "AUTO", "DatasetRecipe", "LaunchRecipe", "Recipe", "Settings", "find_recipe", "load_changes", "load_recipe", "load_source",
    "parse_recipe", "plainest", "recipe_from", "resolve", "resolved", "shipped_recipes", "unresolved", "write_recipe",
]  # fmt: skip
