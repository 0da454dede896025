"""A followed run: reads only what is new, is the same however often it is read, and survives a restart of the app."""

import json

import pytest

from app import live as live_module
from app.live import LiveRun
from finetune.events import EventWriter
from finetune.run.directory import RunDirectory


@pytest.fixture
def run(tmp_path):
    path = tmp_path / "runs" / "one"
    path.mkdir(parents=True)
    return RunDirectory(path)


def write_steps(run, first, last, **more):
    writer = EventWriter(run.events)
    for step in range(first, last + 1):
        writer.emit("step", step=step, total_steps=1000, loss=10.0 / step, process_rss_bytes=2**30, step_s=0.5, **more)
    writer.close()


def follow(run, tmp_path):
    return LiveRun(run, tmp_path / "keep.json")


def test_a_tick_reads_only_what_is_new(run, tmp_path, monkeypatch):
    write_steps(run, 1, 50)
    live = follow(run, tmp_path)
    live.refresh()
    taken = []
    monkeypatch.setattr(live.digest, "take", taken.append)
    live.refresh()
    assert taken == []
    write_steps(run, 51, 53)
    live.refresh()
    assert [event["step"] for event in taken] == [51, 52, 53]


def test_reading_at_once_and_in_pieces_gives_the_same(run, tmp_path):
    pieces = follow(run, tmp_path)
    for first in range(1, 100, 10):
        write_steps(run, first, first + 9)
        pieces.refresh()
    once = follow(run, tmp_path)
    once.wait()
    assert once.digest.as_json() == pieces.digest.as_json()


def test_a_torn_last_line_is_read_when_it_is_whole(run, tmp_path):
    write_steps(run, 1, 2)
    line = json.dumps({"kind": "step", "step": 3, "loss": 1.0, "total_steps": 9}) + "\n"
    with run.events.open("a") as file:
        file.write(line[:20])
    live = follow(run, tmp_path)
    live.refresh()
    assert live.digest.step == 2
    with run.events.open("a") as file:
        file.write(line[20:])
    live.refresh()
    assert live.digest.step == 3


def test_a_file_that_was_replaced_is_read_from_its_beginning(run, tmp_path):
    write_steps(run, 1, 20)
    live = follow(run, tmp_path)
    live.refresh()
    run.events.rename(run.path / "old")
    write_steps(run, 1, 3)
    live.refresh()
    assert live.digest.step == 3
    assert len(live.digest.series["loss"].bins) == 3


def test_nan_and_unknown_kinds_do_no_harm(run, tmp_path):
    writer = EventWriter(run.events)
    writer.emit("step", step=1, total_steps=9, loss=float("nan"), grad_norm=None)
    writer.emit("news of a later version", step=["?"], loss={})
    writer.emit("step", step=2, total_steps=9, loss=1.5)
    writer.close()
    live = follow(run, tmp_path)
    live.refresh()
    assert live.digest.series["loss"].points() == [(1.5, None), (2.0, 1.5)]


def test_a_long_history_is_read_in_the_background_and_kept(run, tmp_path, monkeypatch):
    monkeypatch.setattr(live_module, "DIGEST_BYTES", 50_000)
    write_steps(run, 1, 5000, filler="x" * 100)
    live = follow(run, tmp_path)
    assert live.refresh() is False
    live.wait()
    live._keep_digest()
    again = follow(run, tmp_path)
    again.refresh()
    again.wait()
    assert again._kept > 50_000
    assert again.digest.series["loss"].points() == live.digest.series["loss"].points()
    assert again.digest.step == 5000


def test_marks_say_what_happened_when(run, tmp_path):
    writer = EventWriter(run.events)
    writer.emit("start", resumed_from=None, step=0)
    writer.emit("step", step=1, total_steps=4, loss=1.0)
    writer.emit("eval", step=2, eval_loss=0.9, eval_s=1.0)
    writer.emit("checkpoint", step=2, path="x", bytes=1, save_s=0.1, seal_s=0.1)
    writer.emit("retry", attempt=2, reason="out of memory", changes={})
    writer.emit("start", resumed_from="checkpoint-2", step=2)
    writer.close()
    live = follow(run, tmp_path)
    live.refresh()
    assert [(mark["name"], mark["step"]) for mark in live.digest.marks] == [
        ("start", 0), ("first step", 1), ("evaluation", 2), ("save", 2), ("retry", 1), ("resume", 2),
    ]  # fmt: skip
