"""Fit: what a person chose is never lost, the newest question wins, and what is known to stop a run stops it at once."""

import dataclasses
import itertools
import json
import re
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import gradio as gr
import pytest

from app.context import Context
from app.pages.fit import _View
from app.pages.fit_answers import FitAnswers
from app.planning.blocker import blocker_of
from app.planning.process import Questions
from app.views import fit as fit_view
from app.views import plan as plan_view
from app.views.recipe_form import fields, form
from app.worker import SupersededError, Work, answer_of, result_of
from app.workspace import Workspace
from finetune.bundled import dataset_paths
from finetune.recipe import recipe_from

SKIPPED = gr.skip()


@pytest.fixture
def view(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    context = Context(Workspace(tmp_path, tmp_path / "runs"), tmp_path / "temporary")
    view = _View(context)

    def call(method, report=None, newest=False, **values):
        return result_of(answer_of(Questions(), method, values, Work(report)))

    view.context.planner.call = call
    yield view
    context.close()


@pytest.fixture
def answers(view):
    return FitAnswers(view.context)


def act(view, page="one", **message):
    """The acknowledgement of a message of the page."""
    act.sent = getattr(act, "sent", 0) + 1
    return json.loads(view.act(json.dumps({**message, "sent": act.sent, "page": page})))


def test_a_text_typed_into_an_older_recipe_is_refused_and_said(view):
    draft = view.context.draft
    basis = draft.stamp
    act(view, "two", set="lora_r", value=64)
    acknowledged = act(view, text="lora_r: 3", basis=basis)
    assert "was changed" in acknowledged["refused"] and acknowledged["text_refused"]
    assert acknowledged["stamp"] == draft.stamp and "lora_r: 64" in acknowledged["text"]
    assert draft.read().recipe.lora_r == 64


def test_every_key_that_is_typed_is_taken_though_its_basis_is_the_key_before(view):
    draft = view.context.draft
    basis, text = draft.stamp, draft.read().text
    for letter in "seed: 7":
        text += letter
        acknowledged = act(view, text=text, basis=basis)
        assert acknowledged["refused"] == "" and not acknowledged["text_refused"]
    assert draft.read().text == text == acknowledged["text"]


def test_two_writes_of_one_moment_have_different_stamps(view):
    stamps = [act(view, set="lora_r", value=rank)["stamp"] for rank in range(1, 30)]
    assert len(set(stamps)) == len(stamps)


def test_what_was_read_before_a_message_was_acted_on_can_be_told_from_what_was_read_after(view, answers):
    before = answers.draft()
    acknowledged = act(view, set="lora_r", value=48)
    after = answers.draft()
    assert before["read"] < acknowledged["read"] < after["read"]
    assert before["stamp"] != acknowledged["stamp"] == after["stamp"] and after["numbers"]["lora_r"] == 48


def test_a_number_left_to_the_planner_is_the_plans(view, answers):
    acknowledged = act(view, auto="effective_batch_size")
    assert "effective_batch_size" not in acknowledged["numbers"]
    planned = answers.plan()
    assert planned["stamp"] == acknowledged["stamp"] and planned["numbers"]["effective_batch_size"] > 0


def test_the_card_is_written_only_where_another_one_is_shown(view):
    assert view.follow("cpu") == SKIPPED and view.follow("rtx-3060") == "cpu"


def test_quick_messages_of_a_page_are_all_acted_on_once_and_in_order(view):
    first, second, third = ({"set": "lora_r", "value": rank, "sent": rank} for rank in (8, 16, 24))
    view.act(json.dumps({**second, "page": "a", "earlier": [first]}))
    view.context.draft.change(lora_r=48)
    other = {"field": "seed", "text": "7", "sent": 30, "page": "a", "earlier": [first, second]}
    assert json.loads(view.act(json.dumps(other)))["refused"] == ""
    assert (view.context.draft.read().recipe.lora_r, view.context.draft.read().recipe.seed) == (48, 7)
    acknowledged = json.loads(view.act(json.dumps(other)))
    assert "refused" not in acknowledged and acknowledged["sent"] == 30
    view.act(json.dumps({**third, "page": "b", "earlier": [first, second]}))  # numbers are each page's own
    assert view.context.draft.read().recipe.lora_r == 24


def test_a_message_that_fails_is_not_tried_again_with_the_next(view, monkeypatch):
    monkeypatch.setattr(view.context.draft, "apply", lambda _: 1 / 0)
    failing = {"override": "lora_r=8", "sent": 1}
    with pytest.raises(ZeroDivisionError):
        view.act(json.dumps({**failing, "page": "a"}))
    view.act(json.dumps({"set": "lora_r", "value": 24, "sent": 2, "page": "a", "earlier": [failing]}))
    assert view.context.draft.read().recipe.lora_r == 24


def test_a_start_takes_the_edits_that_are_still_on_their_way(view, monkeypatch):
    monkeypatch.setattr(view.context.queue, "ensure_starter", lambda: None)  # no run: only what is queued
    view.start(False, json.dumps({"set": "lora_r", "value": 24, "sent": 1, "page": "a"}))
    [entry] = view.context.queue.entries()
    assert "lora_r: 24" in entry.recipe.read_text()


def test_a_field_refuses_what_is_no_value_of_it_and_says_so(view):
    message = act(view, field="learning_rate", text="quick")["refused"]
    assert "learning_rate" in message and view.context.draft.read().recipe.learning_rate == 0.004
    assert act(view, field="trust_remote_code", text="true")["refused"] == ""
    assert view.context.draft.read().recipe.trust_remote_code is False


def test_the_form_has_each_setting_once_with_its_name_and_help():
    names = {field.name for field in fields()}
    shown = form()
    assert set(re.findall(r'data-field="([^"]+)"', shown)) == names and len(names) > 70
    assert set(re.findall(r'for="key-([^"]+)"', shown)) == {name.replace(".", "-") for name in names}
    assert "trust_remote_code" not in shown


def test_a_draft_that_is_read_while_it_changes_has_the_stamp_of_its_text(view):
    draft, versions = view.context.draft, []

    def read():
        while len({version.stamp for version in versions}) < 40:
            versions.append(draft.version())

    stamps = {}
    with ThreadPoolExecutor() as pool:
        reading = pool.submit(read)
        for rank in itertools.cycle(range(1, 250)):
            text = draft.change(lora_r=rank).text
            stamps[draft.stamp] = text
            time.sleep(0.0005)  # the other thread's turn
            if reading.done():
                break
    assert all(stamps[version.stamp] == version.edited.text for version in versions if version.stamp in stamps)


@pytest.mark.parametrize("typed", [5, 99999, 3.7, None, "many"])
def test_a_number_out_of_range_is_no_error_and_changes_nothing(view, typed):
    before = view.context.draft.read().text
    assert act(view, set="max_length", value=typed)["refused"] == ""
    assert view.context.draft.read().text == before
    act(view, set="max_length", value=512)
    assert view.context.draft.read().recipe.max_length == 512


def test_the_newest_question_ends_an_older_one_and_stale_answers_are_not_shown(view, answers):
    asked, newer = threading.Event(), threading.Event()
    call = view.context.planner.call

    def slow(method, recipe, **values):
        if "lora_r: 48" in recipe:
            asked.set()
            assert newer.wait(60)
            raise SupersededError
        newer.set()
        return call(method, recipe=recipe, **values)

    view.context.planner.call = slow
    with ThreadPoolExecutor() as pool:
        act(view, set="lora_r", value=48)
        first = pool.submit(answers.plan)
        other_tab = pool.submit(answers.plan)  # asks nothing of its own
        assert asked.wait(60)
        act(view, set="lora_r", value=64)
        newest = answers.plan()
        assert first.result() is None
        assert "rank 48" not in str(other_tab.result())  # nothing, or the newest where this thread had its turn late
    assert newest["stamp"] == view.context.draft.stamp and "rank 64" in newest["parts"]["reasons"]


def test_a_plan_is_shown_before_its_alternatives_are_forecast(view, answers):
    call, shown = view.context.planner.call, threading.Event()

    def slow(method, recipe, report, **values):
        result = call(method, recipe=recipe, report=report, **values)
        assert shown.wait(60)
        return result

    view.context.planner.call = slow
    view.context.draft.write("model_name_or_path: tiny\ndataset: support\ngpu: cpu\n")
    assert "being planned" in answers.plan()["parts"]["alternatives"]
    shown.set()
    complete = answers.compared()
    assert complete["stamp"] == view.context.draft.stamp and "<table" in complete["parts"]["alternatives"]


def plan_of(**values):
    recipe = recipe_from({"model_name_or_path": "tiny", "dataset": "support", "gpu": "cpu", "max_length": 256, **values})
    return recipe, Questions().make_plan(recipe)


def test_a_missing_file_blocks_run_though_its_plan_fits(view):
    recipe, plan = plan_of(dataset="data/nothere.jsonl")
    blocker = blocker_of(recipe, plan, Path.cwd())
    assert "nothere.jsonl" in blocker.problems[0] and blocker.override == ""
    assert 'href="/"' in plan_view.blocker_note(blocker)
    assert 'ft-verdict warn"' in fit_view.verdict(plan, blocked=True)


def test_a_file_is_looked_for_where_the_page_was_started_and_not_where_its_process_is(view, tmp_path, monkeypatch):
    (tmp_path / "data").mkdir()
    (tmp_path / "data" / "mine.jsonl").write_text("{}")
    recipe, plan = plan_of(dataset="support")
    recipe = recipe.model_copy(update={"dataset": recipe.dataset.model_copy(update={"path": "data/mine.jsonl"})})
    unread = dataclasses.replace(plan, data=None)  # as where the model's tokenizer is not on this machine yet
    monkeypatch.chdir("/")
    assert blocker_of(recipe, unread, tmp_path) is None
    missing = recipe.model_copy(update={"dataset": recipe.dataset.model_copy(update={"path": "else/mine.jsonl"})})
    assert str(tmp_path) in blocker_of(missing, unread, tmp_path).fix


def test_refused_rows_block_run_with_a_button_that_leaves_them_out(view, tmp_path):
    rows = dataset_paths("support")["train"].read_text()
    (tmp_path / "bad.jsonl").write_text(rows + '{"messages": []}\n' * 36)
    blocker = blocker_of(*plan_of(dataset="bad.jsonl"), Path.cwd())
    assert (blocker.label, blocker.override) == ("Leave out 36 rows", "dataset.on_bad_rows=skip")
    assert blocker_of(*plan_of(dataset={"path": "bad.jsonl", "on_bad_rows": "skip"}), Path.cwd()) is None


def test_a_card_that_is_not_here_blocks_run(view):
    blocker = blocker_of(*plan_of(gpu="rtx-3060"), Path.cwd())
    assert blocker is not None and blocker.elsewhere and "RTX 3060" in blocker.problems[0]
    assert "Planned for another machine" in plan_view.blocker_note(blocker)
    assert blocker_of(*plan_of(), Path.cwd()) is None


def test_run_is_shown_blocked_with_its_remedy(view, answers, tmp_path):
    rows = dataset_paths("support")["train"].read_text()
    (tmp_path / "bad.jsonl").write_text(rows + '{"messages": []}\n')
    view.context.draft.change(dataset={"path": "bad.jsonl"})
    shown = answers.plan()
    assert shown["start"] is False and "Leave out 1 row" in shown["parts"]["trouble"]
    act(view, override="dataset.on_bad_rows=skip")
    assert view.context.draft.read().recipe.dataset.on_bad_rows == "skip"
    assert answers.plan()["start"] is True
