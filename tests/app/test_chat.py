"""A conversation is what its file says: of the lines of both models, of earlier versions, and of damaged ones."""

import json
import time
from types import SimpleNamespace

import gradio as gr
import pytest

from app.chat.chats import COMPARISON, Chats, Turn
from app.chat.process import Conversation, LoadedModels
from app.context import Context
from app.pages.chat import _conversation, _two_models, _View
from app.workspace import Workspace
from finetune.planner.plan import read_plan
from finetune.run.directory import RunDirectory


@pytest.fixture
def chats_with(tmp_path):
    """chats_with(*lines) -> the chats, the run and the file that holds these lines."""

    def write(*lines):
        workspace, run = Workspace(tmp_path, tmp_path), RunDirectory(tmp_path / "one")
        chats = Chats(workspace)
        chats.path(run).write_text("".join(f"{json.dumps(line)}\n" for line in lines) + '{"kind": "ans')
        return chats, run

    return write


def question(identity, text):
    return {"kind": "question", "time_s": 1.0, "id": identity, "text": text}


def answer(identity, model, text):
    return {"kind": "answer", "time_s": 1.0, "id": identity, "model": model, "text": text}


def test_turns_have_the_answers_as_far_as_they_are(chats_with):
    chats, run = chats_with(
        question("a", "one?"), answer("a", "base", "b1"), answer("a", "tuned", "t1"), {"kind": "done", "id": "a"},
        question("b", "two?"), {"kind": "error", "id": "b", "text": "no memory"},
        question("c", "three?"), answer("c", "base", "b3"), answer("c", "third", "x"), answer("unasked", "base", "x"),
    )  # fmt: skip
    assert chats.turns(run) == [
        Turn("one?", {"base": "b1", "tuned": "t1"}, done=True), Turn("two?", error="no memory", done=True),
        Turn("three?", {"base": "b3"}),
    ]  # fmt: skip


def test_each_model_continues_with_its_own_answers(chats_with):
    chats, run = chats_with(question("a", "one?"), answer("a", "base", "b1"), answer("a", "tuned", "t1"))
    messages = Conversation(run, chats.path(run))._messages
    assert [message["content"] for message in messages["tuned"]] == ["one?", "t1"]
    assert [message["content"] for message in messages["base"]] == ["one?", "b1"]


def piece(identity, model, text):
    return {"kind": "piece", "time_s": 1.0, "id": identity, "model": model, "text": text}


def test_an_answer_is_shown_as_it_is_made_and_a_dead_process_leaves_what_it_wrote(chats_with):
    chats, run = chats_with(
        {**question("a", "one?"), "models": ["tuned"]}, piece("a", "tuned", "It is "), piece("a", "tuned", "<b>late"),
    )  # fmt: skip
    [turn] = chats.turns(run)
    assert (turn.models, turn.partial, turn.answers) == (("tuned",), {"tuned": "It is <b>late"}, {})
    assert "It is &lt;b&gt;late" in _conversation([turn], {}) and 'class="ft-turn base"' not in _conversation([turn], {})
    chats, run = chats_with(
        question("a", "one?"), piece("a", "tuned", "It"), {**answer("a", "tuned", "It is"), "tokens": 2, "tokens_per_s": 8.0,
                                                         "stopped": True}, {"kind": "done", "id": "a"},
    )  # fmt: skip
    [turn] = chats.turns(run)
    assert (turn.partial, turn.notes) == ({}, {"tuned": "2 tokens, 8.0 tokens/s, stopped"})


def test_a_call_of_a_tool_is_shown_by_its_name_and_arguments(chats_with):
    call = {"name": "<b>find</b>", "arguments": {"city": "Oslo", "days": 3}}
    chats, run = chats_with({**question("a", "one?"), "models": ["tuned/x"]}, {**answer("a", "tuned/x", ""), "calls": [call]})
    shown = _conversation(chats.turns(run), {"tuned/x": "<i>x</i>"})
    assert "calls &lt;b&gt;find&lt;/b&gt;" in shown and "<dt>city</dt><dd>Oslo</dd><dt>days</dt><dd>3</dd>" in shown
    assert "empty answer" not in shown and "&lt;i&gt;x&lt;/i&gt;" in shown
    [message] = Conversation(run, chats.path(run))._messages["tuned/x"][1:]
    assert message["tool_calls"] == [{"type": "function", "function": call}]


class Address:
    def __init__(self, **query_params):
        self.query_params = query_params


def test_the_page_offers_every_run_with_a_model_and_each_base_once(tmp_path, kept_run):
    runs = tmp_path / "runs"
    kept_run(runs).rename(runs / "first")
    kept_run(runs).rename(runs / "second")
    (runs / "empty").mkdir()
    context = Context(Workspace(tmp_path, runs), tmp_path / "temporary")
    left, right = _View(context).offer(Address(run="first"))
    assert (left.value, right.value) == ("tuned/first", "base/first")
    assert {value for _, value in left.choices} == {"tuned/first", "tuned/second", "base/first"}
    assert dict(right.choices)["Nobody"] == ""
    assert "no adapter" in _View(context).ask(COMPARISON, "Hello", 16, "", 0, 1, 0, "", "tuned/gone", "")[1]
    assert not context.chats.turns(RunDirectory(runs / COMPARISON))
    context.close()


def test_bases_whose_names_end_alike_are_both_offered(tmp_path, kept_run):
    runs = tmp_path / "runs"
    for name in ("one", "two"):
        run = kept_run(runs).rename(runs / name)
        plan = json.loads((run / "plan.json").read_text())
        plan["plan"]["model_name_or_path"] = f"{name}/tiny-2"
        (run / "plan.json").write_text(json.dumps(plan))
    context = Context(Workspace(tmp_path, runs), tmp_path / "temporary")
    choices = dict(_View(context).offer(Address())[0].choices)
    assert choices["one/tiny-2, the base model"] == "base/one" and choices["two/tiny-2, the base model"] == "base/two"
    asked = [Turn("Hello", {}, models=("base/one", "base/two"))]
    assert list(_View(context)._names(asked).values()) == ["one/tiny-2, the base model", "two/tiny-2, the base model"]
    context.close()


def test_a_model_of_before_a_restart_is_taken_and_one_that_is_none_is_refused_by_its_name(tmp_path):
    context = Context(Workspace(tmp_path, tmp_path / "runs"), tmp_path / "temporary")
    with gr.Blocks():
        assert [box.preprocess("tuned/first") for box in _two_models()] == ["tuned/first"] * 2
    for typed in ("first", "other/first"):
        assert f"{typed} has no adapter" in _View(context).ask(COMPARISON, "Hello", 16, "", 0, 1, 0, "", typed, "")[1]
    assert "Choose a model" in _View(context).ask(COMPARISON, "Hello", 16, "", 0, 1, 0, "", "", "")[1]
    context.close()


def test_what_offloaded_layers_cost_is_said_of_each_chosen_run(tmp_path, kept_run, monkeypatch):
    runs = tmp_path / "runs"
    kept_run(runs)
    context = Context(Workspace(tmp_path, runs), tmp_path / "temporary")
    copies = SimpleNamespace(generation_summary="each token copies 9 GiB")
    live = SimpleNamespace(plan=lambda: SimpleNamespace(layer_copies=copies, settings=SimpleNamespace(vision=False)))
    monkeypatch.setattr(context.lives, "of", lambda run: live)
    view = _View(context)
    assert view.show(COMPARISON, "", "tuned/finished", "base/finished")[1].count("finished: each token copies 9 GiB") == 1
    assert "each token copies" in view.show("finished", "", "Tuned")[1] and "copies" not in view.show(COMPARISON, "", "", "")[1]
    context.close()


def test_a_base_that_no_answer_needs_goes_first_and_that_is_not_called_loading_in_turn(tmp_path, kept_run):
    needed = read_plan(RunDirectory(kept_run(tmp_path)).plan).forecast.peaks["load"]
    loaded = LoadedModels(lambda _: needed * (3 - len(loaded._answerers)))
    run = RunDirectory(tmp_path / "finished")
    loaded._answerers = {name: SimpleNamespace(model=object()) for name in ("asked", "earlier", "older")}
    assert not loaded._unload_for(run, {"asked", "finished"}) and list(loaded._answerers) == ["asked", "older"]
    loaded._free_bytes = lambda _: 0
    assert loaded._unload_for(run, {"asked", "finished"}) and loaded._answerers == {}


@pytest.mark.slow
@pytest.mark.parametrize("free_bytes", [0, 2**40])
def test_two_runs_share_a_base_and_another_base_is_loaded_beside_it_where_it_fits_else_in_turn(tmp_path, kept_run, free_bytes):
    runs = [kept_run(tmp_path / str(number)).rename(tmp_path / name) for number, name in enumerate(("one", "two", "other"))]
    plan = runs[2] / "plan.json"
    plan.write_text(plan.read_text().replace('"dtype": "float32"', '"dtype": "bfloat16"'))
    loaded = LoadedModels(lambda device: free_bytes)
    first_run, second_run, third_run = map(RunDirectory, runs)
    names = {"one", "two", "other"}
    first, alone = loaded.of(first_run, names)
    assert loaded.of(second_run, names)[0].model is first.model and not alone
    assert loaded.of(third_run, names)[1] == (free_bytes == 0)
    assert set(loaded._answerers) == ({"other"} if free_bytes == 0 else names)
    assert loaded.of(first_run, names)[1] == (free_bytes == 0)


@pytest.mark.slow
def test_two_runs_answer_one_question_side_by_side(tmp_path, kept_run):
    kept_run(tmp_path).rename(tmp_path / "first")
    chats, run = Chats(Workspace(tmp_path, tmp_path)), RunDirectory(tmp_path / COMPARISON)
    models = ("tuned/first", "base/first")
    try:
        chats.ask(run, "Where is my parcel?", 8, models=models)
        while not ((turns := chats.turns(run)) and turns[0].done):
            time.sleep(0.05)
        assert turns[0].models == models and set(turns[0].answers) == set(models), turns[0].error
    finally:
        chats.close()


@pytest.mark.slow
def test_both_answer_from_one_seed_and_a_stop_keeps_their_text_so_far(tmp_path, kept_run):
    chats, run = Chats(Workspace(tmp_path, tmp_path)), RunDirectory(kept_run(tmp_path))

    def wait(until):
        while not until(turns := chats.turns(run)):
            time.sleep(0.02)
        return turns

    try:
        how = {"temperature": 1.5, "seed": 7, "system": "Be short."}
        for _ in range(2):
            chats.ask(run, "Where is my parcel?", 40, **how)
        first, second = wait(lambda turns: len(turns) == 2 and turns[1].done)
        assert set(first.answers) == set(second.answers) == {"base", "tuned"}
        assert "tokens/s" in first.notes["base"] and first.error is None, first.error
        chats.ask(run, "Tell me everything.", 100_000, models=["tuned"], temperature=5.0)
        wait(lambda turns: len(turns) == 3 and turns[2].partial.get("tuned"))
        chats.stop(run)
        last = wait(lambda turns: turns[2].done)[2]
        assert "stopped" in last.notes["tuned"] and last.answers["tuned"] and last.error is None
    finally:
        chats.close()
