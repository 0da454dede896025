"""A conversation is what its file says, also of damaged lines; its pictures are kept by their bytes, in the messages' order."""

import errno
import json
import os
import shutil
import signal
import time
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
from picture_models import save_picture_model, save_picture_rows
from PIL import Image
from written_runs import make_run

from app.chats import Answer, Chats, Conversation, Turn, _stored_picture, store_picture, stored_pictures
from app.pages import chat
from app.pages.run import RunPage
from app.worker import Work
from app.workspace import Workspace
from finetune.data.pictures.source import BadPicture
from finetune.errors import CommandError, FinetuneError
from finetune.events import EventWriter
from finetune.recipe import recipe_from
from finetune.run.directory import RunDirectory
from finetune.run.prepare import create_run, prepare
from finetune.run.worker import Worker


@pytest.fixture
def chats_with(tmp_path):
    """chats_with(*lines) -> the chats, the run and the file that holds these lines."""

    def write(*lines):
        workspace, run = Workspace(tmp_path, tmp_path), RunDirectory(tmp_path / "one")
        chats = Chats(workspace)
        chats.path(run).write_text("".join(f"{json.dumps(line)}\n" for line in lines) + '{"kind": "ans')
        return chats, run

    return write


def turn(identity, text, error="", **answers):
    answers = {model: {"tokens": 1} | answer for model, answer in answers.items()}
    return {"kind": "turn", "time_s": 1.0, "id": identity, "text": text, "answers": answers, "error": error}


def test_turns_have_the_answers_as_far_as_they_are_calls_by_name_and_each_model_continues_with_its_own(chats_with):
    base, tuned = {"text": "b1"}, {"text": "t1", "tokens": 2, "tokens_per_s": 8.0, "stopped": True}
    chats, run = chats_with(
        turn("a", "one?", base=base), turn("b", "two?", "no memory"), turn("a", "one?", base=base, tuned=tuned)
    )  # fmt: skip
    turns = chats.turns(run)
    answers = [{model: sample.text for model, sample in turn.answers.items()} for turn in turns]
    assert answers == [{"base": "b1", "tuned": "t1"}, {}]
    assert [turn.error for turn in turns] == ["", "no memory"]
    assert "2 tokens, 8.0 tokens/s, stopped" in chat.conversation(turns, chats)
    chats, run = chats_with(turn("a", "one?", base={"text": "b1"}, tuned={"text": "t1"}))
    conversation = Conversation(run, chats.path(run))
    for model, last in (("tuned", "t1"), ("base", "b1")):
        assert [message["content"] for message in conversation.history(model)[0]] == ["one?", last]
    call = {"type": "function", "function": {"name": "<b>find</b>", "arguments": {"city": "Oslo", "days": 3}}}
    chats, run = chats_with(turn("a", "one?", tuned={"calls": [call]}) | {"models": ["tuned"]})
    shown = chat.conversation(chats.turns(run), chats)
    assert "calls &lt;b&gt;find&lt;/b&gt;" in shown and "<dt>city</dt><dd>Oslo</dd><dt>days</dt><dd>3</dd>" in shown
    assert "empty answer" not in shown
    [message] = Conversation(run, chats.path(run)).history("tuned")[0][1:]
    assert message["tool_calls"] == [call]


def test_an_answer_is_shown_as_it_is_made_and_a_dead_process_leaves_what_it_said(chats_with):
    chats, run = chats_with()

    def call(method, report, **_):
        for piece in ("It is ", False), ("<b>late", False):
            report(piece)
        [turn] = chats.turns(run)
        assert turn.answers == {"tuned": Answer(text="It is <b>late")}
        shown = chat.conversation([turn], chats)
        assert "It is &lt;b&gt;late" in shown and 'class="ft-turn base"' not in shown and "ft-busy" in shown
        raise FinetuneError("the process was killed")

    chats._worker_for = lambda _: SimpleNamespace(call=call)
    chats.ask(run, "one?", 9, models=["tuned"]).result(60)
    [turn] = chats.turns(run)
    assert (turn.answers["tuned"].text, turn.answers["tuned"].stopped) == ("It is <b>late", True)
    assert turn.error.strip() == "the process was killed" and "ft-busy" not in chat.conversation([turn], chats)


@pytest.mark.parametrize(("asked", "can_stop"), [([], False), (["1"], False), (["1", "2"], True)])
def test_stop_can_be_pressed_only_while_there_is_an_answer_to_stop(context, monkeypatch, asked, can_stop):
    run, turns = make_run(context.workspace.runs, "one", []), [Turn(id=identity, text="a") for identity in asked]
    monkeypatch.setattr(context.chats, "turns", lambda _: turns)
    context.chats.answering["2"] = None  # the other's app was killed
    parts = chat.parts(context, run)
    assert ("disabled" not in parts["stop"]) is can_stop is ("ft-busy" in parts["turns"])


SENT = {"question": "Hello", "who": "tuned", "system": "", "most": "16", "temperature": "0", "top_p": "1", "seed": "0"}


@pytest.mark.parametrize(("change", "reason"), [({}, "empty has no adapter"), ({"question": " "}, "Write a message")])
def test_a_message_that_nobody_can_answer_is_refused(context, change, reason):
    make_run(context.workspace.runs, "empty", [])
    assert reason in RunPage(context).act("empty", {"task": "ask", "values": SENT | change})["said"]


def test_what_offloaded_layers_cost_is_said(context, kept_run, monkeypatch):
    run = RunDirectory(kept_run(context.workspace.runs))
    copies = SimpleNamespace(generation_summary="each token copies 9 GiB")
    live = SimpleNamespace(plan=lambda: SimpleNamespace(layer_copies=copies))
    monkeypatch.setattr(context.lives, "follow", lambda run: live)
    assert "each token copies" in chat.parts(context, run)["warning"]


@pytest.mark.slow
def test_both_answer_from_one_seed_and_a_stop_keeps_their_text_so_far(tmp_path, kept_run):
    chats, run = Chats(Workspace(tmp_path, tmp_path)), RunDirectory(kept_run(tmp_path))

    def ask(text="Where is my parcel?", most=40, models=("base", "tuned"), end=None, **how):
        asked = chats.ask(run, text, most, models=models, **how)
        while end and not ((so_far := chats.turns(run)[-1].answers.get("tuned")) and so_far.text):
            time.sleep(0.02)
        if end:
            end()
        asked.result(300)
        return chats.turns(run)[-1]

    long = {"text": "Tell me everything.", "most": 100_000, "models": ["tuned"], "temperature": 5.0}
    try:
        first, _ = (ask(temperature=1.5, seed=7, system="Be short.") for _ in range(2))
        texts = [{model: answer.text for model, answer in turn.answers.items()} for turn in chats.turns(run)]
        assert [set(models) for models in texts] == [{"base", "tuned"}] * 2
        assert first.answers["base"].tokens_per_s and first.error == ""
        stopped = ask(**long, end=lambda: chats.stop(run))
        assert stopped.answers["tuned"].stopped and stopped.answers["tuned"].text and stopped.error == ""
        assert "was killed" in ask(**long, end=lambda: os.kill(chats._worker._process.pid, signal.SIGKILL)).error
        assert ask(most=4, models=["tuned"]).answers["tuned"].text
    finally:
        chats.close()


def picture(path, size=(60, 40), colour="red"):
    Image.new("RGB", size, colour).save(path, "PNG")
    return str(path)


def test_an_upload_is_kept_by_its_bytes_and_what_is_no_picture_or_was_changed_is_refused_or_left_out(tmp_path):
    folder, upload = tmp_path / "pictures", picture(tmp_path / "a.png")
    name = store_picture(folder, upload)
    assert not Path(upload).exists()
    assert [(image.path, image.width, image.height) for image in stored_pictures(folder, [name])] == [(folder / name, 60, 40)]
    (tmp_path / "b.png").write_text("no picture")
    with pytest.raises(BadPicture):
        store_picture(folder, str(tmp_path / "b.png"))
    picture(folder / ("0" * 40))
    shutil.copy(folder / name, tmp_path / "outside")
    names = ["0" * 40, "../outside", "f" * 40, name]
    assert [source.digest for source in stored_pictures(folder, names)] == [name]


@pytest.mark.slow
def test_models_get_the_pictures_of_all_messages_also_after_a_restart(tmp_path):
    model = save_picture_model("qwen2_5_vl", tmp_path / "vl")
    rows = save_picture_rows(tmp_path / "rows", [(60, 40), (57, 57)])
    workspace = Workspace(tmp_path, tmp_path / "runs")
    run = create_run(prepare(recipe_from({
        "model_name_or_path": model, "dataset": {"path": rows}, "gpu": "cpu", "dtype": "float32", "load_in_4bit": False,
        "lora_r": 4, "lora_alpha": 8, "effective_batch_size": 1, "max_steps": 1, "save_steps": 1,
        "per_device_train_batch_size": 1, "optim": "adamw_torch", "output_dir": str(workspace.runs / "one"),
    })))  # fmt: skip
    assert Worker(run).main() == 0
    chats = Chats(workspace)
    names = [
        store_picture(chats.pictures, picture(tmp_path / f"{colour}.png", size, colour))
        for colour, size in (("red", (60, 40)), ("blue", (90, 90)))
    ]
    writer = EventWriter(chats.path(run))

    def ask(conversation, identity, pictures):
        turn = Turn(id=identity, text=f"{identity}?", models=("tuned",), pictures=tuple(pictures))
        writer.emit(turn)
        answered = conversation.answer(Work(), "tuned", turn.text, turn.pictures, max_new_tokens=4)
        writer.emit(replace(turn, answers={"tuned": Answer(**answered)}))

    ask(Conversation(run, chats.path(run)), "first", names[:1])
    continued = Conversation(run, chats.path(run))
    assert [source.digest for source in continued.history("tuned")[1]] == names[:1]
    ask(continued, "second", names[1:])
    messages, shown = continued.history("tuned")
    assert [source.digest for source in shown] == names
    assert [message.get("pictures") for message in messages] == [1, None, 1, None]
    (chats.pictures / names[1]).unlink()
    _stored_picture.cache_clear()
    with pytest.raises(CommandError, match="was removed"):
        ask(continued, "third", names[1:])
    first, second, _ = chats.turns(run)
    assert (first.pictures, second.pictures) == ((names[0],), (names[1],))
    assert all("tuned" in turn.answers for turn in (first, second))


def test_a_picture_that_the_disk_has_no_space_for_is_said_and_one_from_elsewhere_is_not_taken(context, tmp_path, monkeypatch):
    def fail(*_):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    def added(path):
        return RunPage(context).act("one", {"task": "picture", "values": {"path": path, "waiting": ""}})

    context.uploads.mkdir(parents=True)
    make_run(context.workspace.runs, "one", [])
    name = added(picture(context.uploads / "a.png"))["waiting"]
    assert [source.digest for source in stored_pictures(context.chats.pictures, [name])] == [name]
    assert "was not uploaded here" in added(picture(tmp_path / "a.png"))["said"]
    monkeypatch.setattr("app.chats.shutil.move", fail)
    assert "No space left on device" in added(picture(context.uploads / "b.png"))["said"]
