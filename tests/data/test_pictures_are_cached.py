"""Rows with pictures come from the cache while their pictures are the same; each picture is decoded once."""

from __future__ import annotations

import shutil

import pytest
from picture_data import VISION_CHATML, encoded, picture, pictures_stay_one_token  # noqa: F401 - a fixture
from small_data import build_tokenizer, prepare, recipe

from finetune.data import token_cache
from finetune.data.pictures import source


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


def _prepare(path, **settings):
    tokenizer = build_tokenizer(VISION_CHATML, extra=("<|image_pad|>",))
    return prepare(recipe(path, **settings), tokenizer, max_length=None, report_only=True)


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
    assert len(_prepare(data).report.rows_refused) == 1
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


def test_a_damaged_file_of_sizes_costs_only_time(data, decoded):
    _prepare(data)
    cache_file = source.size_cache(source.pictures_folder()).path
    sizes = cache_file.read_text()
    cache_file.write_text(f"{'x' * 40} 1 1\n{sizes[:70]}\n?\n{sizes.split()[-3]} 11 1")  # ends within a number
    source.size_cache.cache_clear()
    shutil.rmtree(token_cache.cache_folder())
    assert _widths(_prepare(data)) == [8, 9, 10, 11] and len(decoded) == 7


def test_the_file_of_sizes_stays_bounded(tmp_path, monkeypatch):
    monkeypatch.setattr(source, "MAX_SIZES", 10)
    first = source.SizeCache(tmp_path)
    for index in range(30):
        first.add(f"{index:040x}", (8, 6))
    assert first.get(f"{3:040x}") is None and first.get(f"{29:040x}") == (8, 6)
    second = source.SizeCache(tmp_path)
    assert second.get(f"{29:040x}") == (8, 6) and len(second.path.read_text().splitlines()) <= 10
