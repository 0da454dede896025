"""events.jsonl is the only channel: nothing written is lost, nothing half-written is read, and what is damaged stops nobody."""

import dataclasses
import json
import math
import random
from typing import Any, get_args, get_type_hints

import pytest

from finetune.events import (
    KINDS,
    Checkpoint,
    Evaluation,
    EventReader,
    EventWriter,
    RunWarning,
    Start,
    State,
    Step,
    event_from,
    event_json,
    read_events,
)
from finetune.run.state import Pace


def steps(events):
    return [event.step for event in events if isinstance(event, Step)]


def test_a_reader_and_a_listener_get_each_event_once(tmp_path):
    writer, reader = EventWriter(tmp_path / "e"), EventReader(tmp_path / "e")
    writer.emit(Step(step=1))
    assert steps(reader.new()) == [1]
    writer.emit(Step(step=2))
    assert steps(EventReader(tmp_path / "e", reader.offset).new()) == steps(reader.new()) == [2]
    assert reader.new() == []
    heard = []
    writer.listeners.append(heard.append)
    writer.emit(RunWarning(message="a"))
    assert heard == reader.new()


def test_a_torn_last_line_is_left_for_later_and_another_writer_does_not_continue_it(tmp_path):
    path = tmp_path / "e"
    path.write_bytes(b'{"kind": "step", "step": 1}\n{"kind": "st')
    reader = EventReader(path)
    assert steps(reader.new()) == [1]
    with path.open("ab") as file:
        file.write(b'ep", "step": 2}\n')
    assert steps(reader.new()) == [2]
    path.write_bytes(b'{"kind": "step", "step": 1}\n{"kind": "st')
    EventWriter(path).emit(Step(step=2))
    assert steps(read_events(path)) == [1, 2]


def test_what_is_not_an_event_is_left_out(tmp_path):
    steps_without_one = b'{"kind": "step"}\n{"kind": "step", "step": "x"}\n{"kind": "step", "step": null}\n'
    others = (
        b'1\n[]\n{"no": "kind"}\n{"kind": "of_a_later_version"}\n{"kind": 5}\nnot json\n\xff\xfe\n' + b"[" * 100_000 + b"\n"
    )
    (tmp_path / "e").write_bytes(steps_without_one + others)
    assert read_events(tmp_path / "e") == []


@pytest.mark.parametrize(
    ("line", "event"),
    [
        ('{"kind": "step", "step": 7}', Step(step=7)),
        ('{"kind": "step", "step": 7, "news": {"a": 1}}', Step(step=7)),
        ('{"kind": "step", "step": 7, "loss": {}, "step_s": 0.5, "time_s": "now"}', Step(step=7, step_s=0.5)),
        ('{"kind": "start", "versions": 5, "approximate_because": null}', Start()),
        ('{"kind": "state", "state": "running", "message": null}', State(state="running")),
    ],
)
def test_what_can_be_read_of_a_line_is(tmp_path, line, event):
    (tmp_path / "e").write_text(line + "\n")
    assert read_events(tmp_path / "e") == [event]


def test_lines_begin_with_kind_and_time_and_memory_comes_before_the_checksum(tmp_path):
    EventWriter(tmp_path / "e").emit(Step(step=1, process_rss_bytes=5))
    names = list(json.loads((tmp_path / "e").read_text()))
    assert names[:4] == ["kind", "time_s", "step", "total_steps"]
    assert names[-3:] == ["process_rss_bytes", "process_peak_rss_bytes", "checksum"]


def filled(kind):
    values = {
        int: 3, float: math.inf, str: "x", bool: True, tuple[str, ...]: ("y",), dict[str, str]: {"a": "b"},
        dict[str, int]: {"a": 3}, dict[str, float]: {"a": -math.inf}, dict[str, Any]: {"a": 1},
    }  # fmt: skip
    annotations = get_type_hints(kind)
    types = {field.name: (annotations[field.name], *get_args(annotations[field.name])) for field in dataclasses.fields(kind)}
    return kind(**{name: next(values[type_] for type_ in hints if type_ in values) for name, hints in types.items()})


@pytest.mark.parametrize("kind", KINDS.values(), ids=lambda kind: kind.kind)
def test_every_kind_comes_back_as_it_was_written(kind, tmp_path):
    written = filled(kind)
    assert all(value is not None for value in vars(written).values())
    assert event_from(json.loads(json.dumps(event_json(written)))) == written
    EventWriter(tmp_path / "e").emit(written)
    (read,) = read_events(tmp_path / "e")
    assert dataclasses.replace(read, time_s=written.time_s) == written and read.time_s > 1e9


def test_no_damage_to_a_file_raises(tmp_path):
    writer = EventWriter(tmp_path / "whole")
    for event in (filled(kind) for kind in KINDS.values()):
        writer.emit(event)
    whole, chance = (tmp_path / "whole").read_bytes(), random.Random(3)
    inserted = [b"", b"\n", b'"', b"{", b"]", b"9" * 400, b"-", b"\xff", b"null"]
    for _ in range(300):
        damaged = bytearray(whole)
        for _ in range(chance.randrange(1, 30)):
            offset = chance.randrange(len(damaged))
            damaged[offset : offset + chance.randrange(3)] = chance.choice(inserted)
        (tmp_path / "e").write_bytes(damaged)
        for event in read_events(tmp_path / "e"):
            json.dumps(event_json(event))


def test_what_a_resume_relies_on_is_synced(tmp_path, monkeypatch):
    synced, writer = [], EventWriter(tmp_path / "e")
    monkeypatch.setattr("os.fsync", lambda _: synced.append(steps(read_events(tmp_path / "e")) or "durable"))
    writer.emit(Checkpoint(step=1))
    writer.emit(State(state="running"))
    writer.emit(Step(step=1))
    assert synced == ["durable", "durable"]


def left_after(step_s, *, total=100, eval_steps=None, eval_s=20.0):
    """The time left after steps of these lengths, with an evaluation after every `eval_steps` but the newest."""
    pace = Pace()
    pace.add(Start(total_steps=total, eval_steps=eval_steps))
    for number, seconds in enumerate(step_s, 1):
        if eval_steps and number > 1 and (number - 1) % eval_steps == 0:
            pace.add(Evaluation(step=number - 1, eval_s=eval_s))
        pace.add(Step(step=number, total_steps=total, step_s=seconds))
    return pace.left_s


def test_the_time_left_is_of_the_newest_steps_and_the_evaluations_to_come_and_unknown_in_another_attempt():
    assert left_after([1.0] * 9, total=99) == 90.0 and left_after([]) is None
    assert left_after([100.0] * 4 + [1.0] * 10, total=104) == 90.0
    assert left_after([1.0] * 22, eval_steps=10) == pytest.approx(78 + 7 * 20)  # after 30, 40 to 90
    assert left_after([1.0] * 20, eval_steps=10) == pytest.approx(80 + 8 * 20)  # the evaluation of step 20 has not ended
    pace = Pace()
    for event in (Step(step=1, total_steps=9, step_s=2.0), Start(step=1, total_steps=9)):
        pace.add(event)
    assert pace.left_s is None
