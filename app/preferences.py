"""What a person prefers on this page, in a file of the app's own: so far the price of an hour."""

from __future__ import annotations

import math

from finetune.files import read_json, write_json

from .workspace import Workspace


class Preferences:
    """Reads and writes the file; each value has a default."""

    def __init__(self, workspace: Workspace) -> None:
        self._path = workspace.state / "preferences.json"

    @property
    def price(self) -> float:
        """Price of an hour of this machine, from which Fit shows a run's cost; 0: no cost is shown."""
        try:
            return float(read_json(self._path, dict)["price"])
        except (OSError, ValueError, KeyError, TypeError):
            return 0.0

    def set_price(self, text: str) -> bool:
        """Keep the price; False, and nothing is changed, when it is no number from 0."""
        try:
            price = float(text.replace(",", ".") or 0)
        except ValueError:
            return False
        if not math.isfinite(price) or price < 0:
            return False
        self._path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        write_json(self._path, {"price": price})
        return True
