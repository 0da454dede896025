"""Pictures in the page's chat: kept by the digest of their bytes, given to the models in the order of the messages."""

import errno
import os
import shutil
from pathlib import Path

import pytest
from picture_models import save_picture_model, save_picture_rows
from PIL import Image

from app.chat.chats import Chats, Question
from app.chat.pictures import _kept, keep_picture, kept_pictures
from app.chat.process import Conversation
from app.context import Context
from app.pages.run import RunPage
from app.worker import Work
from app.workspace import Workspace
from finetune.data.pictures.source import BadPicture
from finetune.errors import CommandError
from finetune.events import EventWriter, event_json
from finetune.recipe import recipe_from
from finetune.run.directory import RunDirectory
from finetune.run.prepare import create_run, prepare
from finetune.run.worker import Worker


def picture(path, size=(60, 40), colour="red"):
    Image.new("RGB", size, colour).save(path, "PNG")
    return str(path)


def test_an_upload_is_kept_by_its_bytes_and_what_is_no_picture_is_refused(tmp_path):
    folder, upload = tmp_path / "pictures", picture(tmp_path / "a.png")
    name = keep_picture(folder, upload)
    assert not Path(upload).exists()
    assert [(source.path, source.width, source.height) for source in kept_pictures(folder, [name])] == [(folder / name, 60, 40)]
    (tmp_path / "b.png").write_text("no picture")
    with pytest.raises(BadPicture):
        keep_picture(folder, str(tmp_path / "b.png"))


def test_a_name_that_is_none_and_a_picture_that_was_changed_are_left_out(tmp_path):
    folder = tmp_path / "pictures"
    name = keep_picture(folder, picture(tmp_path / "a.png"))
    picture(folder / ("0" * 40))
    shutil.copy(folder / name, tmp_path / "outside")
    names = ["0" * 40, "../outside", "f" * 40, name]
    assert [source.digest for source in kept_pictures(folder, names)] == [name]


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
        keep_picture(chats.pictures, picture(tmp_path / f"{colour}.png", size, colour))
        for colour, size in (("red", (60, 40)), ("blue", (90, 90)))
    ]
    writer = EventWriter(chats.path(run))

    def ask(conversation, identity, pictures):
        question = Question(id=identity, text=f"{identity}?", models=("tuned",), pictures=tuple(pictures))
        writer.emit(question)
        conversation.answer(Work(), event_json(question), max_new_tokens=4)

    ask(Conversation(run, chats.path(run)), "first", names[:1])
    continued = Conversation(run, chats.path(run))
    assert [source.digest for source in continued._pictures["tuned"]] == names[:1]
    ask(continued, "second", names[1:])
    assert [source.digest for source in continued._pictures["tuned"]] == names
    assert [message.get("pictures") for message in continued._messages["tuned"]] == [1, None, 1, None]
    (chats.pictures / names[1]).unlink()
    _kept.cache_clear()
    with pytest.raises(CommandError, match="gone"):
        ask(continued, "third", names[1:])
    first, second, _ = chats.turns(run)
    assert (first.question.pictures, second.question.pictures) == ((names[0],), (names[1],))
    assert all("tuned" in turn.answers for turn in (first, second))


def test_a_picture_that_the_disk_has_no_space_for_is_said_and_one_from_elsewhere_is_not_taken(tmp_path, monkeypatch):
    context = Context(Workspace(tmp_path, tmp_path / "runs"), tmp_path / "temporary")

    def fail(*_):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    def added(path):
        message = {"task": "picture", "values": {"path": path, "waiting": ""}}
        return RunPage(context).act(RunDirectory(tmp_path / "runs" / "one"), message)

    context.uploads.mkdir(parents=True)
    name = added(picture(context.uploads / "a.png"))["waiting"]
    assert [source.digest for source in kept_pictures(context.chats.pictures, [name])] == [name]
    assert "was not uploaded here" in added(picture(tmp_path / "a.png"))["said"]
    monkeypatch.setattr("app.chat.pictures.shutil.move", fail)
    assert "No space left on device" in added(picture(context.uploads / "b.png"))["said"]
    context.close()
