"""Settings being resolved: what the recipe sets is kept, everything else gets a value with one line of reason."""

from __future__ import annotations

from typing import Any

from finetune.recipe import AUTO, Recipe, resolved


class Choices:
    """A recipe whose `auto` settings are filled in one by one."""

    def __init__(self, recipe: Recipe) -> None:
        self.recipe = recipe
        self.values: dict[str, Any] = {}
        self.reasons: dict[str, str] = {}

    def is_set(self, name: str) -> bool:
        """Whether the recipe decides this setting itself."""
        return getattr(self.recipe, name) != AUTO

    def value(self, name: str) -> Any:
        """The recipe's own value, else the chosen one."""
        return getattr(self.recipe, name) if self.is_set(name) else self.values[name]

    def choose(self, name: str, value: Any, reason: str) -> None:
        """Resolve one setting; what the recipe sets is kept."""
        if self.is_set(name):
            self.reasons[name] = "as the recipe sets it"
        else:
            self.values[name], self.reasons[name] = value, reason

    def settings(self, **more: Any) -> Recipe:
        """The recipe with the choices (and `more`) filled in. Raises ValueError when they don't agree."""
        return resolved(self.recipe, **{**self.values, **more})
