"""Rows are the same examples in every kind of file; a damaged file is named."""

import gzip
import json

import pyarrow as pa
import pyarrow.parquet as parquet
import pytest
from small_data import read_examples, recipe

from finetune.errors import DataError


def examples_of(path):
    return read_examples(recipe(path).dataset).train.examples


def zstd(text):
    return pa.Codec("zstd").compress(text.encode(), asbytes=True)


def test_every_kind_of_file_gives_the_same_examples(write, tmp_path):
    rows = [{"prompt": f"Frage {n}, «ü»\n", "completion": f'"{n}", ok 🙂'} for n in range(5)]
    lines, array = "\n".join(map(json.dumps, rows)), json.dumps(rows)
    cells = "".join('"' + '","'.join(value.replace('"', '""') for value in row.values()) + '"\r\n' for row in rows)
    table, tabs = f"prompt,completion\r\n{cells}", "prompt\tcompletion\n" + cells.replace('","', '"\t"')
    files = {
        "a.jsonl": lines, "données é.jsonl": lines, "lines.json": lines, "c.ndjson": lines, "array.jsonl": array,
        "b.json": array, "indented.json": json.dumps(rows, indent=1), "d.json": json.dumps({"data": rows}), "e.csv": table,
        "f.tsv": tabs, "g.csv": "\ufeffprompt;completion\n" + cells.replace('","', '";"'),
        "h.jsonl.gz": gzip.compress(lines.encode()), "i.json.gz": gzip.compress(array.encode()),
        "j.csv.gz": gzip.compress(tabs.encode()), "k.jsonl.zst": zstd(lines), "l.csv.zst": zstd(table),
    }  # fmt: skip
    paths = [write(name, content) for name, content in files.items()]
    parquet.write_table(pa.Table.from_pylist(rows), tmp_path / "m.parquet")
    (tmp_path / "link.tsv").symlink_to(tmp_path / "f.tsv")
    (tmp_path / "folder").mkdir()
    parts = {"a.jsonl": rows[:2], "b.jsonl": rows[2:], "README.md": "about", "LICENSE.txt": "x"}
    for name, content in parts.items():
        write(f"folder/{name}", content)
    for path in [*paths, *(str(tmp_path / name) for name in ("m.parquet", "link.tsv", "folder", "folder/*.jsonl"))]:
        assert [example.content() for example in examples_of(path)] == rows, path
    text = examples_of(write("n.txt", "One line.\n\nAnother.\n"))
    assert [(example.row, example.text) for example in text] == [(1, "One line."), (3, "Another.")]


def test_a_compressed_file_that_is_cut_damaged_or_a_bomb_and_a_pattern_of_nothing_are_refused_by_name(write):
    complete = zstd("".join(json.dumps({"text": f"number {n}"}) + "\n" for n in range(2000)))
    damaged = {"cut.jsonl.zst": complete[: len(complete) // 2], "a.jsonl.zst": b"no zstd", "b.jsonl.gz": b"\x1f\x8b not gzip"}
    for name, content in damaged.items():
        with pytest.raises(DataError, match=f"{name}: can't be read"):
            examples_of(write(name, content))
    with pytest.raises(DataError, match="is longer than 32 MiB"):
        examples_of(write("bomb.jsonl.zst", zstd('{"text": "a"}\n{"text": "' + "a" * 40 * 2**20)))
    with pytest.raises(DataError, match="there is no such file"):
        examples_of("nowhere/*.jsonl")
