"""A conversation is what its file says: of the lines of both models, of earlier versions, and of damaged ones."""

import json
import os
import signal
import time
from pathlib import Path
from types import SimpleNamespace

import pytest
from written_runs import make_run

from app.chat.chats import Chats, Done, Question, Turn
from app.chat.process import Conversation
from app.context import Context
from app.pages import chat
from app.pages.run import RunPage
from app.workspace import Workspace
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


def shown_turns(turns):
    return chat.conversation(turns, Path("pictures"))


def test_turns_have_the_answers_as_far_as_they_are(chats_with):
    chats, run = chats_with(
        question("a", "one?"), answer("a", "base", "b1"), answer("a", "tuned", "t1"), {"kind": "done", "id": "a"},
        question("b", "two?"), {"kind": "done", "id": "b", "error": "no memory"},
        question("c", "three?"), answer("c", "base", "b3"), answer("unasked", "base", "x"),
    )  # fmt: skip
    turns = chats.turns(run)
    answers = [{model: sample.text for model, sample in turn.answers.items()} for turn in turns]
    assert answers == [{"base": "b1", "tuned": "t1"}, {}, {"base": "b3"}]
    assert [turn.done and turn.done.error for turn in turns] == ["", "no memory", None]


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
    assert (turn.partial["tuned"].text, turn.answers) == ("It is <b>late", {})
    assert "It is &lt;b&gt;late" in shown_turns([turn]) and 'class="ft-turn base"' not in shown_turns([turn])
    chats, run = chats_with(
        question("a", "one?"), piece("a", "tuned", "It"), {**answer("a", "tuned", "It is"), "tokens": 2, "tokens_per_s": 8.0,
                                                         "stopped": True}, {"kind": "done", "id": "a"},
    )  # fmt: skip
    [turn] = chats.turns(run)
    assert turn.partial == {} and "2 tokens, 8.0 tokens/s, stopped" in shown_turns([turn])


def test_a_call_of_a_tool_is_shown_by_its_name_and_arguments(chats_with):
    call = {"type": "function", "function": {"name": "<b>find</b>", "arguments": {"city": "Oslo", "days": 3}}}
    chats, run = chats_with({**question("a", "one?"), "models": ["tuned"]}, {**answer("a", "tuned", ""), "calls": [call]})
    shown = shown_turns(chats.turns(run))
    assert "calls &lt;b&gt;find&lt;/b&gt;" in shown and "<dt>city</dt><dd>Oslo</dd><dt>days</dt><dd>3</dd>" in shown
    assert "empty answer" not in shown
    [message] = Conversation(run, chats.path(run))._messages["tuned"][1:]
    assert message["tool_calls"] == [call]


ASKED = Question(id="1", text="a")


@pytest.mark.parametrize(
    ("turns", "alive", "can_stop"),
    [
        ([], True, False), ([Turn(ASKED, done=Done(id="1"))], True, False),
        ([Turn(ASKED)], True, True), ([Turn(ASKED)], False, False),
    ],
)  # fmt: skip
def test_stop_can_be_pressed_only_while_there_is_an_answer_to_stop(tmp_path, monkeypatch, turns, alive, can_stop):
    context = Context(Workspace(tmp_path, tmp_path / "runs"), tmp_path / "temporary")
    run = make_run(tmp_path / "runs", "one", [])
    monkeypatch.setattr(context.chats, "turns", lambda _: turns)
    monkeypatch.setattr(context.chats, "is_answering", lambda _: alive)
    parts = chat.parts(context, run)
    assert ("disabled" not in parts["stop"]) is can_stop is ("ft-busy" in parts["turns"])
    context.close()


SENT = {"question": "Hello", "who": "tuned", "system": "", "most": "16", "temperature": "0", "top_p": "1", "seed": "0"}


@pytest.mark.parametrize(("change", "reason"), [({}, "empty has no adapter"), ({"question": " "}, "Write a message")])
def test_a_message_that_nobody_can_answer_is_refused(tmp_path, change, reason):
    context = Context(Workspace(tmp_path, tmp_path / "runs"), tmp_path / "temporary")
    run = make_run(tmp_path / "runs", "empty", [])
    assert reason in RunPage(context).act(run, {"task": "ask", "values": SENT | change})["said"]
    context.close()


def test_what_offloaded_layers_cost_is_said(tmp_path, kept_run, monkeypatch):
    runs = tmp_path / "runs"
    kept_run(runs)
    context = Context(Workspace(tmp_path, runs), tmp_path / "temporary")
    copies = SimpleNamespace(generation_summary="each token copies 9 GiB")
    live = SimpleNamespace(plan=lambda: SimpleNamespace(layer_copies=copies))
    monkeypatch.setattr(context.lives, "of", lambda run: live)
    assert "each token copies" in chat.parts(context, RunDirectory(runs / "finished"))["warning"]
    context.close()


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
        texts = [{model: answer.text for model, answer in turn.answers.items()} for turn in (first, second)]
        assert [set(models) for models in texts] == [{"base", "tuned"}] * 2
        assert first.answers["base"].tokens_per_s and first.done.error == ""
        chats.ask(run, "Tell me everything.", 100_000, models=["tuned"], temperature=5.0)
        wait(lambda turns: len(turns) == 3 and turns[2].partial.get("tuned"))
        chats.stop(run)
        last = wait(lambda turns: turns[2].done)[2]
        assert last.answers["tuned"].stopped and last.answers["tuned"].text and last.done.error == ""
        chats.ask(run, "Tell me everything.", 100_000, models=["tuned"], temperature=5.0)
        wait(lambda turns: turns[3].partial.get("tuned"))
        os.kill(chats._worker._process.pid, signal.SIGKILL)
        assert "was killed" in wait(lambda turns: turns[3].done)[3].done.error
        chats.ask(run, "Where is my parcel?", 4, models=["tuned"])
        assert wait(lambda turns: turns[4].done)[4].answers["tuned"].text
    finally:
        chats.close()
