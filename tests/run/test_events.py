"""events.jsonl is the only channel: nothing written is lost, nothing half-written is read."""

import math

import pytest

from finetune.events import EventReader, EventWriter, read_events


def test_a_reader_gets_each_event_once(tmp_path):
    writer, reader = EventWriter(tmp_path / "e"), EventReader(tmp_path / "e")
    writer.emit("step", step=1)
    assert [event["step"] for event in reader.new()] == [1]
    writer.emit("step", step=2)
    assert [event["step"] for event in reader.new()] == [2]
    assert reader.new() == []


def test_a_torn_last_line_is_left_for_later(tmp_path):
    path = tmp_path / "e"
    path.write_bytes(b'{"kind": "step", "step": 1}\n{"kind": "st')
    reader = EventReader(path)
    assert len(reader.new()) == 1
    with path.open("ab") as file:
        file.write(b'ep", "step": 2}\n')
    assert [event["step"] for event in reader.new()] == [2]


def test_a_writer_does_not_continue_the_line_of_a_dead_one(tmp_path):
    path = tmp_path / "e"
    path.write_bytes(b'{"kind": "step", "step": 1}\n{"kind": "st')
    EventWriter(path).emit("step", step=2)
    assert [event["step"] for event in read_events(path)] == [1, 2]


def test_what_is_not_an_event_is_left_out(tmp_path):
    (tmp_path / "e").write_bytes(b'1\n[]\n{"no": "kind"}\nnot json\n\xff\xfe\n{"kind": "new one"}\n')
    assert read_events(tmp_path / "e") == [{"kind": "new one"}]


@pytest.mark.parametrize(("value", "written"), [(math.nan, "nan"), (math.inf, "inf"), (-math.inf, "-inf"), (None, None)])
def test_numbers_that_json_has_not_are_text(tmp_path, value, written):
    EventWriter(tmp_path / "e").emit("step", loss=value, nested={"list": [value]})
    event = read_events(tmp_path / "e")[0]
    assert (event["loss"], event["nested"]["list"]) == (written, [written])


def test_a_reader_can_go_on_from_a_kept_offset(tmp_path):
    writer, reader = EventWriter(tmp_path / "e"), EventReader(tmp_path / "e")
    writer.emit("step", step=1)
    reader.new()
    writer.emit("step", step=2)
    assert [event["step"] for event in EventReader(tmp_path / "e", reader.offset).new()] == [2]
