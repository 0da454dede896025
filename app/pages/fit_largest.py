"""Fit: the largest value of a setting that fits, searched by the planner process while the page goes on."""

from __future__ import annotations

import functools
import threading
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import gradio as gr

from finetune.errors import FinetuneError
from finetune.recipe import write_recipe

from ..language import mark, tr
from ..planning.planner import SupersededError
from ..views.binding import BUTTON, QUIET
from ..views.markup import action, inert, note
from ..views.problems import problem
from ..views.words import setting_name

if TYPE_CHECKING:
    from ..context import Context
    from .fit_layout import Largest


def build(context: Context, components: Largest) -> None:
    """Connect the components."""
    searches = _Searches(context)
    shown = [components.answer, components.timer]
    for name, button in components.buttons.items():
        button.click(functools.partial(searches.start, name), None, shown, **BUTTON)
    components.timer.tick(searches.tick, None, shown, **QUIET)


#: What the largest value of a setting is, where all fit.
_LIMITS = {
    "max_length": mark("the model's own limit"), "lora_r": mark("the model's width"),
    "per_device_train_batch_size": mark("the largest that is tried"),
}  # fmt: skip


@dataclass(frozen=True)
class _Search:
    setting: str
    answer: Future[dict[str, Any]] = field(default_factory=Future)


class _Searches:
    def __init__(self, context: Context) -> None:
        self.context = context
        self._newest: _Search | None = None

    def start(self, setting: str) -> list[Any]:
        """Search for the draft as it is now; one that goes on already stays."""
        recipe = self.context.draft.read().recipe
        if recipe is None:
            return [note(tr("The recipe has settings to correct.")), gr.Timer(active=False)]
        if self._newest is None or self._newest.answer.done():
            search = self._newest = _Search(setting)
            threading.Thread(target=self._ask, args=(search, write_recipe(recipe)), daemon=True).start()
        return self.tick()

    def _ask(self, search: _Search, recipe: str) -> None:
        try:
            search.answer.set_result(self.context.planner.ask("largest", recipe=recipe, setting=search.setting))
        except Exception as error:  # noqa: BLE001 - shown by `tick`
            search.answer.set_exception(error)

    def tick(self) -> list[Any]:
        """What is known by now, and whether to look again."""
        search = self._newest
        if search is None:
            return ["", gr.Timer(active=False)]
        if not search.answer.done():
            progress = self.context.planner.progress or tr("searching")
            text = tr("{change}: {result} …", change=setting_name(search.setting), result=progress)
            return [note(text), gr.Timer(active=True)]
        return [self._shown(search), gr.Timer(active=False)]

    def _shown(self, search: _Search) -> str:
        name = setting_name(search.setting)
        try:
            largest = search.answer.result()["largest"]
        except SupersededError:
            return note(tr("{setting}: ended, as the recipe was planned anew. Press again.", setting=name))
        except FinetuneError as error:
            return problem(error.title, error.problems, error.fix)
        pressed = action(override=" ".join(largest["overrides"]))
        take = f'<button type="button" class="ft-small" {pressed}>{tr("Take it")}</button>' if largest["value"] else ""
        return f'<p role="status">{inert(_sentence(name, largest))} {take}</p>'


def _sentence(name: str, largest: dict[str, Any]) -> str:
    value, too_large = (f"{part:,}" if isinstance(part, int) else part for part in (largest["value"], largest["too_large"]))
    if not largest["value"]:
        return tr("{setting}: {value} does not fit either", setting=name, value=too_large)
    if too_large is None:
        limit = tr(_LIMITS.get(largest["setting"], largest["limit"]))
        return tr("{setting}: {value} at most ({limit})", setting=name, value=value, limit=limit)
    return tr("{setting}: {value} at most ({more} does not surely fit)", setting=name, value=value, more=too_large)
