"""A changed byte of a file that this program wrote is not taken for what it wrote: it is named, or the file is made again."""

import contextlib
import json

import pytest

from finetune.card import measured_context, record_measurement
from finetune.evaluate.results import Journal
from finetune.events import EventWriter, RunWarning, Step, read_events
from finetune.files import parse_checked, read_json, with_checksum, write_json
from finetune.memory import cache
from finetune.planner.plan import plan_was_edited


def change_a_digit(path, old=b"4", new=b"5"):
    content = path.read_bytes()
    assert old in content
    path.write_bytes(content.replace(old, new, 1))


def test_every_changed_byte_of_a_line_is_no_other_value():
    text, values = with_checksum(json.dumps({"loss": 1.25, "name": "ü"})).encode(), {"loss": 1.25, "name": "ü"}
    assert parse_checked(text) == values
    for index in range(len(text)):
        for bit in range(8):
            changed = bytearray(text)
            changed[index] ^= 1 << bit
            with contextlib.suppress(ValueError):
                assert values.items() <= parse_checked(bytes(changed)).items(), (index, bit)


def test_a_changed_event_is_a_warning(tmp_path):
    writer = EventWriter(tmp_path / "events.jsonl")
    for step in (1, 2):
        writer.emit(Step(step=step, total_steps=2, loss=0.4))
    change_a_digit(writer.path, b'"loss": 0.4', b'"loss": 0.5')
    first, second = read_events(writer.path)
    assert isinstance(first, RunWarning) and "has changed since it was written" in first.message
    assert isinstance(second, Step) and second.loss == 0.4


def test_a_changed_forecast_context_or_answer_in_a_cache_is_none(tmp_path, monkeypatch):
    monkeypatch.setenv("FINETUNE_CACHE", str(tmp_path))
    assert cache.cached("key", int, lambda: 4) == cache.cached("key", int, lambda: 5) == 4
    change_a_digit(tmp_path / "forecasts" / "key.json")
    assert cache.cached("key", int, lambda: 6) == 6
    record_measurement("RTX 3080", 400)
    assert measured_context("RTX 3080")[0] == 400
    change_a_digit(tmp_path / "contexts.json", b"400", b"500")
    assert measured_context("RTX 3080") is None
    Journal(tmp_path, "tuned", {}).add({"row": {"loss": 0.4}})
    assert Journal(tmp_path, "tuned", {}).entries == {"row": {"loss": 0.4}}
    change_a_digit(next(tmp_path.glob("tuned-*")), b"0.4", b"0.5")
    assert Journal(tmp_path, "tuned", {}).entries == {}


def test_the_key_of_a_cached_forecast_is_of_all_code_that_computes_it():
    root = cache.Path(cache.__file__).resolve().parents[1]
    assert all((root / folder).is_dir() for folder in cache._OWN_CODE)


def test_an_edited_plan_is_known(tmp_path):
    write_json(tmp_path / "plan.json", {"lora_r": 4}, checksum=True)
    assert not plan_was_edited(tmp_path / "plan.json")
    change_a_digit(tmp_path / "plan.json")
    assert plan_was_edited(tmp_path / "plan.json") and read_json(tmp_path / "plan.json", may_be_edited=True)["lora_r"] == 5
    with pytest.raises(ValueError, match="has changed since it was written"):
        read_json(tmp_path / "plan.json")
