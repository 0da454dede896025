"""A file of any content, or with a changed byte, is named, left out or made again; it never hides another run."""

import contextlib
import json
import os
import re

import pytest

from finetune.card import measured_context, record_measurement
from finetune.errors import FinetuneError
from finetune.evaluate.results import Journal, read_evaluations, read_forgetting
from finetune.evaluate.rows import held_out_rows
from finetune.events import EventWriter, RunWarning, Step, read_events
from finetune.files import (
    MANIFEST,
    changes_in,
    parse_checked,
    parse_json,
    read_json,
    read_limited,
    read_safetensors_header,
    with_checksum,
    write_json,
)
from finetune.memory import cache
from finetune.model.configuration import read_config
from finetune.model.weights import check_weights, file_problem
from finetune.planner.history import read_history
from finetune.planner.plan import plan_was_edited, read_plan
from finetune.recipe import load_recipe
from finetune.recipe.complete import read_base_adapter
from finetune.run import control
from finetune.run.directory import RunDirectory
from finetune.run.seal import verify
from finetune.run.state import read_state

DEEP = b"[" * 100_000 + b"]" * 100_000
CONTENTS = {
    "deep": DEEP, "deep-open": b'{"a":' * 100_000, "deep-short": b"[" * 900 + b"]" * 900, "utf-16": "{}".encode("utf-16"),
    "binary": bytes(range(256)), "empty": b"", "null": b"null", "list": b"[[], 1]", "object": b'{"x": 1}', "text": b'"text"',
}  # fmt: skip


#: File below a run -> what reads it, and what it returns or, as a pattern, says of every damaged content.
READERS = {
    "process.json": (lambda run: read_state(run).state, "lost"),
    "plan.json": (lambda run: read_plan(run.plan), re.compile(r"plan\.json can't be read")),
    f"data/{MANIFEST}": (lambda run: verify(run.data) + changes_in(run.data), ["its manifest can't be read"] * 2),
    "evaluations/scores-exact.json": (read_evaluations, {}),
    "evaluations/lost.json": (read_forgetting, None),
    "data/eval_examples.json": (lambda run: held_out_rows(run, None), re.compile(r"eval_examples\.json can't be read")),
    "data/eval/state.json": (lambda run: held_out_rows(run, None), re.compile(r"eval can't be read")),
    "data/eval/dataset_info.json": (lambda run: held_out_rows(run, None), re.compile(r"eval can't be read")),
    "adapter_config.json": (lambda run: read_base_adapter(str(run.path)), re.compile("adapter")),
    "model.safetensors": (lambda run: check_weights(run.path), re.compile(r"model\.safetensors")),
}


@pytest.mark.parametrize("name", READERS)
def test_a_file_of_any_content_is_named_or_left_out(run, name):
    reader, expected = READERS[name]
    (run.data / "eval").mkdir()
    (run.data / "eval_examples.json").write_text("[]")
    (run.data / "eval" / "state.json").write_text('{"_data_files": [], "_format_type": null, "_split": null}')
    path = run.path / name
    for content in CONTENTS.values():
        is_header = path.suffix == ".safetensors"
        path.write_bytes(len(content).to_bytes(8, "little") + content if is_header else content)
        if not isinstance(expected, re.Pattern):
            assert reader(run) == expected
            continue
        with pytest.raises(FinetuneError, match=expected):
            reader(run)


@pytest.fixture
def run(tmp_path):
    (tmp_path / "run" / "evaluations").mkdir(parents=True)
    (tmp_path / "run" / "data").mkdir()
    return RunDirectory(tmp_path / "run")


@pytest.mark.parametrize("values", [b"[" * 101 + b"]" * 101, b'{"a":' * 101 + b"1" + b"}" * 101, DEEP])
def test_json_is_read_to_a_depth_of_a_hundred(values):
    assert parse_json(b"[" * 100 + b"]" * 100) and parse_json('"text"') == "text" and parse_json(b"1") == 1
    with pytest.raises(ValueError, match="nested too deeply"):
        parse_json(values)


def test_a_file_of_more_bytes_and_a_header_over_its_limit_are_not_read_and_a_fifo_not_waited_for(tmp_path):
    (tmp_path / "values.json").write_text("[1, 2, 3]")
    assert read_json(tmp_path / "values.json", list) == [1, 2, 3]
    with pytest.raises(ValueError, match="more than 8 bytes"):
        read_limited(tmp_path / "values.json", 8)
    os.mkfifo(tmp_path / "fifo.json")
    with pytest.raises(OSError, match="not a regular file"):
        read_json(tmp_path / "fifo.json")
    (tmp_path / "weights").write_bytes((2**40).to_bytes(8, "little"))
    with (tmp_path / "weights").open("rb") as file, pytest.raises(ValueError, match="no safetensors file"):
        read_safetensors_header(file)


@pytest.mark.parametrize("make", [os.mkfifo, os.mkdir])
def test_events_that_are_no_file_are_none_and_named_at_a_start(run, make):
    make(run.events)
    assert read_events(run.events) == [] and read_state(run).state == "queued"
    with pytest.raises(FinetuneError, match=r"events\.jsonl is .*; the run needs a regular file there"):
        control.start(run)


def test_infinity_where_a_whole_number_is_read_is_named_and_measurements_that_are_none_are_left_out(run, tmp_path, monkeypatch):
    (run.data / MANIFEST).write_text('{"step": 1e999}')
    assert verify(run.data) == ["its manifest can't be read"]
    row = '{"prompt": "a", "prompt_ids": [1], "answer": "b", "calls": [], "answer_tokens": 1e999}'
    (run.data / "eval_examples.json").write_text(f"[{row}]")
    with pytest.raises(FinetuneError, match=r"eval_examples\.json can't be read"):
        held_out_rows(run, None)
    monkeypatch.setenv("FINETUNE_CACHE", str(tmp_path))
    rows = [{"card": "x", "measured_step_s": value, "modelled_step_s": 1.0} for value in (2.0, "nan", [], 10**400, True)]
    (tmp_path / "history.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    assert len(read_history("x").rows) == 1


@pytest.mark.parametrize("config", [{"num_labels": 10**9}, {"text_config": {"num_hidden_layers": 10**9}}])
def test_a_model_of_a_billion_layers_is_refused_before_they_are_built(tmp_path, config):
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(FinetuneError, match="1,000,000,000, more than"):
        read_config(load_recipe("tiny-cpu", [f"model_name_or_path={tmp_path}"]))


@pytest.mark.parametrize(
    "damage",
    [{"data_offsets": ["0", 4]}, {"data_offsets": [4, 0]}, {"data_offsets": [0]}, {"data_offsets": None}, {"shape": [1.0]},
     {"shape": None}, {"dtype": 32}],
)  # fmt: skip
def test_a_tensor_without_dtype_shape_and_offsets_is_named(tmp_path, damage):
    entry = {"dtype": "F32", "shape": [1], "data_offsets": [0, 4], **damage}
    header = json.dumps({"__metadata__": {"format": "pt"}, "layer.lora_A.weight": entry}).encode()
    path = tmp_path / "adapter_model.safetensors"
    path.write_bytes(len(header).to_bytes(8, "little") + header + bytes(4))
    assert "layer.lora_A.weight" in file_problem(path)


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


def test_a_changed_event_is_a_warning_and_an_edited_plan_is_known(tmp_path):
    writer = EventWriter(tmp_path / "events.jsonl")
    for step in (1, 2):
        writer.emit(Step(step=step, total_steps=2, loss=0.4))
    change_a_digit(writer.path, b'"loss": 0.4', b'"loss": 0.5')
    first, second = read_events(writer.path)
    assert isinstance(first, RunWarning) and "has changed since it was written" in first.message
    assert isinstance(second, Step) and second.loss == 0.4
    write_json(tmp_path / "plan.json", {"lora_r": 4}, checksum=True)
    assert not plan_was_edited(tmp_path / "plan.json")
    change_a_digit(tmp_path / "plan.json")
    assert plan_was_edited(tmp_path / "plan.json") and read_json(tmp_path / "plan.json", may_be_edited=True)["lora_r"] == 5
    with pytest.raises(ValueError, match="has changed since it was written"):
        read_json(tmp_path / "plan.json")


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
