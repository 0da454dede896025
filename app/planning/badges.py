"""Verdicts of models for the draft's data and GPU."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Sequence
from typing import Any

from finetune.errors import FinetuneError
from finetune.planner.plan import Verdict
from finetune.recipe import write_recipe

from ..worker import SupersededError, Worker
from .draft import Draft

#: Seconds after the page's last request at which planning stops.
_LOOKED_S = 6.0


class Badges:
    """Verdicts by model."""

    def __init__(self, planner: Worker, draft: Draft) -> None:
        self._planner, self._draft, self._lock = planner, draft, threading.Lock()
        self._verdicts: dict[tuple[str, str], dict[str, Any]] = {}
        self._wanted: list[str] = []
        self._looked_s, self._is_working = 0.0, False

    def of(self, names: Sequence[str]) -> dict[str, dict[str, Any]]:
        recipe = self._draft.read().recipe
        key = _key(recipe)
        with self._lock:
            # the background thread plans missing verdicts while a page asks
            self._wanted, self._looked_s = list(names), time.monotonic()
            if not self._is_working:
                self._is_working = True
                threading.Thread(target=self._work, daemon=True).start()
        return {name: self._verdicts[key, name] for name in names if (key, name) in self._verdicts}

    def _work(self) -> None:
        while (task := self._next()) is not None:
            recipe, name = task
            try:
                # one call per model: a request of the page waits for one verdict at most
                answer = self._planner.call("badge", recipe=write_recipe(recipe.recipe), model=name)
            except SupersededError:  # the draft's plan goes first
                continue
            except FinetuneError as error:
                answer = {"verdict": Verdict.UNKNOWN, "because": error.problems[0]}
            self._verdicts[_key(recipe.recipe), name] = answer

    def _next(self) -> Any:
        edited = self._draft.read()
        with self._lock:
            if time.monotonic() - self._looked_s < _LOOKED_S:
                key = _key(edited.recipe)
                name = next((name for name in self._wanted if (key, name) not in self._verdicts), None)
                if name is not None:
                    return edited, name
            self._is_working = False
            return None


def _key(recipe: Any) -> str:
    # everything but the model that decides a verdict
    values = recipe.model_dump(mode="json")
    return json.dumps([values[name] for name in ("dataset", "gpu", "max_length")])
