"""A conversation is what its file says: of the lines of both models, of earlier versions, and of damaged ones."""

import json

import pytest

from app.chat.chats import Chats, Turn
from app.chat.process import Conversation
from app.workspace import Workspace
from finetune.run.directory import RunDirectory


@pytest.fixture
def said(tmp_path):
    """said(*lines) -> the chats, the run and the file that holds these lines."""

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


def test_turns_have_the_answers_as_far_as_they_are(said):
    chats, run = said(
        question("a", "one?"), answer("a", "base", "b1"), answer("a", "tuned", "t1"), {"kind": "done", "id": "a"},
        question("b", "two?"), {"kind": "error", "id": "b", "text": "no memory"},
        question("c", "three?"), answer("c", "base", "b3"), answer("c", "third", "x"), answer("unasked", "base", "x"),
    )  # fmt: skip
    assert chats.turns(run) == [
        Turn("one?", {"base": "b1", "tuned": "t1"}, done=True), Turn("two?", error="no memory", done=True),
        Turn("three?", {"base": "b3"}),
    ]  # fmt: skip


def test_each_model_goes_on_with_its_own_answers(said):
    chats, run = said(question("a", "one?"), answer("a", "base", "b1"), answer("a", "tuned", "t1"))
    messages = Conversation(run, chats.path(run))._messages
    assert [message["content"] for message in messages["tuned"]] == ["one?", "t1"]
    assert [message["content"] for message in messages["base"]] == ["one?", "b1"]
