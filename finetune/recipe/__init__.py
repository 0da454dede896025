"""Recipe: what the user wants, as YAML plus overrides."""

from finetune.recipe.load import find_recipe, load_recipe, parse_recipe, recipe_from, shipped_recipes, write_recipe
from finetune.recipe.schema import AUTO, DatasetRecipe, LaunchRecipe, Recipe, resolved, unresolved

__all__ = [
    "AUTO", "DatasetRecipe", "LaunchRecipe", "Recipe", "find_recipe", "load_recipe", "parse_recipe", "recipe_from",
    "resolved", "shipped_recipes", "unresolved", "write_recipe",
]  # fmt: skip
