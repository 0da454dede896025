"""Every accepted form of rows is recognised by its columns and becomes the same example."""

import gzip
import json

import pyarrow as pa
import pyarrow.parquet as parquet
import pytest
from small_data import read_examples, recipe

from finetune.errors import DataError


def examples_of(path, **settings):
    return read_examples(recipe(path, **settings).dataset).train


def test_jsonl_json_csv_and_parquet_give_the_same_examples(write, tmp_path):
    rows = [{"prompt": f"Frage {n}, «ü»\n", "completion": f'"{n}", ok 🙂'} for n in range(5)]
    files = [write("a.jsonl", rows), write("b.json", json.dumps(rows, indent=1)), write("c.json", json.dumps({"data": rows}))]
    files.append(write("lines.json", "\n".join(map(json.dumps, rows))))
    files.append(write("array.jsonl", json.dumps(rows)))
    cells = "".join('"' + '","'.join(value.replace('"', '""') for value in row.values()) + '"\r\n' for row in rows)
    files.append(write("d.csv", "prompt,completion\r\n" + cells))
    files.append(write("e.csv", "\ufeffprompt;completion\n" + cells.replace('","', '";"')))
    parquet.write_table(pa.Table.from_pylist(rows), tmp_path / "f.parquet")
    for file in [*files, str(tmp_path / "f.parquet")]:
        assert [example.content() for example in examples_of(file).examples] == rows, file


def test_folders_patterns_compressed_files_and_other_extensions_give_the_same_examples(write, tmp_path):
    rows = [{"prompt": f"Frage {n}", "completion": f"ü {n}"} for n in range(4)]
    lines = "".join(json.dumps(row) + "\n" for row in rows)
    table = "prompt\tcompletion\n" + "".join("\t".join(row.values()) + "\n" for row in rows)
    (tmp_path / "folder").mkdir()
    (
        write("folder/a.jsonl", rows[:2]),
        write("folder/b.jsonl", rows[2:]),
        write("folder/README.md", "about"),
        write("folder/LICENSE.txt", "x"),
    )
    paths = [str(tmp_path / "folder"), str(tmp_path / "folder" / "*.jsonl"), write("c.ndjson", lines), write("d.tsv", table)]
    paths += [write("e.jsonl.gz", gzip.compress(lines.encode())), write("f.json.gz", gzip.compress(json.dumps(rows).encode()))]
    paths += [write("g.csv.gz", gzip.compress(table.encode())), write("données é.jsonl", lines), str(tmp_path / "link.tsv")]
    (tmp_path / "link.tsv").symlink_to(tmp_path / "d.tsv")
    for path in paths:
        assert [example.content() for example in examples_of(path).examples] == rows, path
    text = examples_of(write("h.txt", "One line.\n\nAnother.\n"))
    assert [(example.row, example.text) for example in text.examples] == [(1, "One line."), (3, "Another.")]


def test_zstd_is_read_and_refused_by_name_when_it_is_cut_damaged_or_a_bomb(write):
    def compressed(text):
        return pa.Codec("zstd").compress(text.encode(), asbytes=True)

    rows = [{"text": f"number {n}"} for n in range(2000)]
    complete = compressed("".join(json.dumps(row) + "\n" for row in rows))
    assert [example.text for example in examples_of(write("a.jsonl.zst", complete)).examples] == [row["text"] for row in rows]
    assert examples_of(write("b.csv.zst", compressed("text\na\nb\n"))).rows_read == 2
    for name, content in (("cut.jsonl.zst", complete[: len(complete) // 2]), ("other.jsonl.zst", b"not zstd at all")):
        with pytest.raises(DataError, match=f"{name}: can't be read"):
            examples_of(write(name, content))
    with pytest.raises(DataError, match="is longer than 32 MiB"):
        examples_of(write("bomb.jsonl.zst", compressed('{"text": "a"}\n{"text": "' + "a" * 40 * 2**20)))


def test_damaged_gzip_and_a_pattern_of_nothing_are_refused_by_name(write):
    with pytest.raises(DataError, match="can't be read"):
        examples_of(write("b.jsonl.gz", b"\x1f\x8b not gzip"))
    with pytest.raises(DataError, match="there is no such file"):
        examples_of("nowhere/*.jsonl")
