"""Rows with pictures as other tools write them become TRL's conversations; unchanged pictures are decoded once."""

from __future__ import annotations

import base64
import shutil
import sys

import pytest
from picture_data import VISION_CHATML, encoded, picture, pictures_stay_one_token  # noqa: F401 - a fixture
from small_data import build_tokenizer, prepare, read_examples, recipe

from app.views.data import marked_row
from finetune.data import token_cache
from finetune.data.pictures import source
from finetune.data.pictures.placement import PICTURE_MARK, with_parts
from finetune.data.pictures.source import open_picture, thumbnails
from finetune.data.sources import read_hub
from finetune.data.tokens import shorten_repeats
from finetune.errors import PackagesError

RED = encoded(picture(8, 6, seed=1))
BASE64 = base64.b64encode(RED).decode()
URI = f"data:image/png;base64,{BASE64}"
ANSWER = {"role": "assistant", "content": "A cat."}


def _asks(*parts, **columns):
    return {"messages": [{"role": "user", "content": list(parts)}, ANSWER], **columns}


TEXT = {"type": "text", "text": "What is it?"}
IMAGE = {"type": "image"}
SHAREGPT = [{"from": "human", "value": "<image>\nWhat is it?"}, {"from": "gpt", "value": "A cat."}]
STRINGS = {"messages": [{"role": "user", "content": "<image>What is it?"}, ANSWER]}
ROWS = {
    "trl": _asks(IMAGE, TEXT, images=["cats/1.png"]),
    "trl, nulls of parquet": _asks({**IMAGE, "text": None, "index": 0}, {**TEXT, "index": None}, images=["cats/1.png"]),
    "trl, texts": {"messages": [{"role": "user", "content": "What is it?"}, ANSWER], "images": ["cats/1.png"]},
    "trl, prompt and completion": {
        "prompt": [{"role": "user", "content": [IMAGE, TEXT]}], "completion": [ANSWER], "images": ["cats/1.png"],
    },
    "transformers": _asks({"type": "image", "path": "cats/1.png"}, TEXT),
    "transformers, base64": _asks({"type": "image", "base64": BASE64}, TEXT),
    "openai, data": _asks(TEXT, {"type": "image_url", "image_url": {"url": URI, "detail": "low"}}),
    "openai, path": _asks(TEXT, {"type": "image_url", "image_url": {"url": "cats/1.png"}}),
    "openai, responses": _asks({"type": "input_text", "text": "What?"}, {"type": "input_image", "image_url": "cats/1.png"}),
    "anthropic": _asks({"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": BASE64}}, TEXT),
    "llama-factory": {**STRINGS, "images": ["cats/1.png"]},
    "llama-factory, alpaca": {"instruction": "<image>What is it?", "input": "", "output": "A cat.", "images": ["cats/1.png"]},
    "llava": {"id": "1", "image": "cats/1.png", "conversations": SHAREGPT},
    "sharegpt4v": {"image": "cats/1.png", "conversations": [*SHAREGPT, {"from": "human", "value": "Sure?"}, SHAREGPT[1]]},
    "axolotl": _asks({"type": "image", "path": "cats/1.png"}, TEXT),
    "axolotl, url": _asks({"type": "image", "url": "cats/1.png"}, TEXT),
    "questions": {"image": "cats/1.png", "question": "What is it?", "answer": "A cat."},
    "captions": {"image": "./cats/1.png", "text": "A cat."},
    "plain pairs": {"image": "cats/1.png", "prompt": "What is it?", "completion": "A cat."},
}  # fmt: skip


@pytest.fixture
def cats(tmp_path, monkeypatch):
    monkeypatch.setenv("FINETUNE_CACHE", str(tmp_path / "cache"))
    (tmp_path / "cats").mkdir()
    (tmp_path / "cats" / "1.png").write_bytes(RED)
    return tmp_path


def _prepare(path, *, report_only=False, **settings):
    tokenizer = build_tokenizer(VISION_CHATML, extra=("<|image_pad|>",))
    return prepare(recipe(path, **settings), tokenizer, max_length=None, report_only=report_only)


def _read(path, **settings):
    rows = read_examples(recipe(str(path), **settings).dataset).train
    assert not rows.refused, rows.refused
    return rows.examples


@pytest.mark.parametrize("form", ROWS)
def test_rows_of_other_tools_become_trls_conversations(form, cats, write):
    (example,) = _read(write("rows.jsonl", [ROWS[form]]))
    row = {"messages": with_parts(list(example.messages)), "images": list(example.pictures)}
    parts = [part["type"] for message in row["messages"] for part in message["content"]]
    assert parts.count("image") == len(row["images"]) == 1
    assert (row["images"][0].width, row["images"][0].height) == (8, 6)
    assert list(open_picture(row["images"][0]).getdata()) == list(picture(8, 6, seed=1).getdata())
    assert row["messages"][1]["content"] == [{"type": "text", "text": "A cat."}]


def test_a_part_stands_where_the_row_has_it(cats, write):
    row = _asks(TEXT, IMAGE, {"type": "text", "text": "And "}, {"type": "image", "path": "cats/2.png"}, images=["cats/1.png"])
    (cats / "cats" / "2.png").write_bytes(encoded(picture(20, 10)))
    example = _read(write("rows.jsonl", [row]))[0]
    question = with_parts(list(example.messages))[0]["content"]
    assert question == [TEXT, IMAGE, {"type": "text", "text": "And "}, IMAGE]
    assert [image.width for image in example.pictures] == [8, 20]


def test_pictures_of_a_hub_dataset_stay_bytes_until_they_are_checked(tmp_path, monkeypatch):
    from datasets import Dataset, Features, Image, List, Value

    features = Features({"image": Image(), "images": List(Image()), "text": Value("string")})
    rows = {"image": [picture(8, 6)], "images": [[picture(9, 5)]], "text": ["a"]}
    monkeypatch.setattr("datasets.config.HF_DATASETS_CACHE", tmp_path / "cache")
    (tmp_path / "rows").mkdir()
    Dataset.from_dict(rows, features=features).to_parquet(str(tmp_path / "rows" / "train.parquet"))
    [row] = read_hub(str(tmp_path / "rows"), None, "train", None)
    assert isinstance(row.values["image"]["bytes"], bytes) and isinstance(row.values["images"][0]["bytes"], bytes)


def test_without_pillow_the_message_has_the_command(cats, write, monkeypatch):
    monkeypatch.setitem(sys.modules, "PIL", None)
    monkeypatch.setitem(sys.modules, "PIL.Image", None)
    with pytest.raises(PackagesError, match="pillow") as error:
        _read(write("rows.jsonl", [ROWS["llava"]]))
    assert "pip install 'pillow" in error.value.fix


def test_the_page_shows_small_pictures_and_counts_of_tokens(cats, write):
    example = _read(write("rows.jsonl", [ROWS["llava"]]))[0]
    row = {"sequences": 1, "index": 0, "marked": [["<b>", True]], "tokens": 3, "trained_tokens": 1}
    (shown,) = thumbnails(example.pictures)
    html = marked_row({**row, "pictures": [shown]})
    assert shown["address"].startswith("data:image/jpeg;base64,/9j/") and shown["address"] in html
    assert 'alt="Image, 8 x 6 pixels"' in html and "<mark><b>" not in html
    (cats / "cats" / "1.png").unlink()
    assert "can no longer be opened" in marked_row({**row, "pictures": thumbnails(example.pictures)})
    assert shorten_repeats("a" + "<|image_pad|>" * 1002 + "b<x><x>") == "a<|image_pad|> x 1,002 b<x><x>"


def test_the_mark_in_a_message_without_pictures_is_a_character():
    asked = {"role": "user", "content": f"{PICTURE_MARK}What?", "pictures": 1}
    with_mark = {"role": "assistant", "content": f"a{PICTURE_MARK}b"}
    assert [message["content"] for message in with_parts([asked, with_mark])] == [
        [{"type": "image"}, {"type": "text", "text": "What?"}], [{"type": "text", "text": f"a{PICTURE_MARK}b"}],
    ]  # fmt: skip


@pytest.fixture
def data(tmp_path, monkeypatch, write):
    """A file of four rows and their pictures; every file is cached."""
    monkeypatch.setattr(token_cache, "SMALL_BYTES", 0)
    monkeypatch.setattr(token_cache, "usable_cpus", lambda: 1)
    monkeypatch.setenv("FINETUNE_CACHE", str(tmp_path / "cache"))
    for index in range(4):
        (tmp_path / f"{index}.png").write_bytes(encoded(picture(8 + index, 6, seed=index)))
    return write("rows.jsonl", [{"image": f"{index}.png", "question": "What?", "answer": "A cat."} for index in range(4)])


@pytest.fixture
def decoded(monkeypatch):
    """The pictures that were decoded."""
    pictures = []
    check = source.checked_size
    monkeypatch.setattr(source, "checked_size", lambda content: pictures.append(content) or check(content))
    return pictures


def _widths(prepared):
    return [example.pictures[0].width for example in prepared.splits[0].examples]


def test_the_second_reading_decodes_nothing_and_gives_the_same(data, decoded, monkeypatch):
    first = _prepare(data)
    assert len(decoded) == 4
    assert _prepare(data).splits[0].examples == first.splits[0].examples
    monkeypatch.setattr(token_cache, "SMALL_BYTES", 2**30)
    source.size_cache.cache_clear()  # as in another process
    second = _prepare(data)
    assert second.splits[0].examples == first.splits[0].examples and second.fingerprint == first.fingerprint
    assert len(decoded) == 4 and second.report.as_json() == first.report.as_json()


def test_a_missing_a_changed_and_another_folders_picture_are_read_again(data, tmp_path):
    (tmp_path / "2.png").rename(tmp_path / "away.png")
    assert len(_prepare(data, report_only=True).report.rows_refused) == 1
    (tmp_path / "away.png").rename(tmp_path / "2.png")
    first = _prepare(data)
    (tmp_path / "2.png").write_bytes(encoded(picture(99, 6)))
    second = _prepare(data)
    assert (_widths(first), _widths(second)) == ([8, 9, 10, 11], [8, 9, 99, 11])
    assert first.fingerprint != second.fingerprint
    other = shutil.copytree(tmp_path, tmp_path.with_name("other"))
    (other / "0.png").write_bytes(encoded(picture(50, 6)))
    assert _widths(_prepare(str(other / "rows.jsonl"))) == [50, 9, 99, 11]


def test_pictures_in_rows_outlive_the_memory_and_a_cleared_cache(data, tmp_path):
    from datasets import Dataset, Features, Image, Value

    features = Features({"image": Image(), "question": Value("string"), "answer": Value("string")})
    rows = {"image": [picture(8, 6)], "question": ["a?"], "answer": ["a"]}
    Dataset.from_dict(rows, features=features).to_parquet(str(tmp_path / "rows.parquet"))
    for _ in range(2):
        (example,) = _prepare(str(tmp_path / "rows.parquet")).splits[0].examples
        assert source.open_picture(example.pictures[0]).size == (8, 6)
        shutil.rmtree(source.pictures_folder())


def test_a_damaged_file_of_sizes_costs_only_time_and_it_stays_bounded(data, decoded, tmp_path, monkeypatch):
    _prepare(data)
    cache_file = source.size_cache(source.pictures_folder()).path
    sizes = cache_file.read_text()
    cache_file.write_text(f"{'x' * 40} 1 1\n{sizes[:70]}\n?\n{sizes.split()[-3]} 11 1")  # ends within a number
    source.size_cache.cache_clear()
    shutil.rmtree(token_cache.cache_folder())
    assert _widths(_prepare(data)) == [8, 9, 10, 11] and len(decoded) == 7
    monkeypatch.setattr(source, "MAX_SIZES", 10)
    first = source.SizeCache(tmp_path)
    for index in range(30):
        first.add(f"{index:040x}", (8, 6))
    assert first.get(f"{3:040x}") is None and first.get(f"{29:040x}") == (8, 6)
    second = source.SizeCache(tmp_path)
    assert second.get(f"{29:040x}") == (8, 6) and len(second.path.read_text().splitlines()) <= 10
