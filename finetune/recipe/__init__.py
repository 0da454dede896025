"""Recipes: settings as YAML plus overrides."""

from finetune.recipe.load import find_recipe, load_recipe, parse_recipe, recipe_from, shipped_recipes, write_recipe

__all__ = ["find_recipe", "load_recipe", "parse_recipe", "recipe_from", "shipped_recipes", "write_recipe"]
