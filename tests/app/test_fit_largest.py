"""Fit: the largest value of a setting that fits, with a button that takes it."""

import json
import re
from html import unescape
from types import SimpleNamespace

from app.pages.fit_largest import _Searches
from app.planning.draft import Draft
from app.planning.planner import SupersededError
from app.planning.process import Questions
from app.workspace import Workspace


def search(tmp_path, setting, ask):
    draft = Draft(Workspace(tmp_path, tmp_path / "runs"))
    draft.write("model_name_or_path: tiny\ndataset: tiny\ngpu: rtx-4090\n")
    searches = _Searches(SimpleNamespace(draft=draft, planner=SimpleNamespace(ask=ask, progress="planning lora_r=64")))
    first = searches.start(setting)
    searches._newest.answer.exception()  # waits
    return draft, first, searches.tick()


def test_the_largest_value_is_shown_and_its_button_sets_it(tmp_path):
    questions = Questions()
    answered = lambda kind, **values: questions.answer({"kind": kind, **values})  # noqa: E731
    draft, _, (shown, timer) = search(tmp_path, "lora_r", answered)
    assert "LoRA rank: 192 at most (the model's width)" in unescape(shown) and not timer.active
    override = json.loads(unescape(re.search(r'data-act="([^"]*)"', shown)[1]))["override"]
    assert draft.apply(override).recipe.lora_r == 192


def test_a_search_that_a_change_of_the_recipe_ends_says_so(tmp_path):
    def ask(kind, **_):
        raise SupersededError

    _, _, (shown, timer) = search(tmp_path, "max_length", ask)
    assert "Press again" in shown and not timer.active
