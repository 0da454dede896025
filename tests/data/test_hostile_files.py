"""Files that are broken, wrong or malicious: one screen that names the file and the fix, never a traceback."""

import json
import os
import random
import tempfile
import time
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as parquet
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from small_data import read_examples, recipe, talk

from finetune.data.sources import DataFiles, Source, read_hub, sources_of
from finetune.errors import DataError
from hostile_data import column_cases, field_cases, problems, split_cases

GOOD = json.dumps(talk("Hi", "Hello")) + "\n"


def problem(path, **dataset) -> str:
    """The one-screen message for a file that can't be read; it names the file and has a remedy."""
    with pytest.raises(DataError) as error:
        read_examples(recipe(path, **dataset).dataset)
    text = "\n".join([*error.value.problems, error.value.fix])
    name = path if isinstance(path, str) else path[0]
    assert error.value.exit_code == 4 and error.value.fix
    assert Path(name).name in text
    assert text.isprintable() or set(text) - {"\n"} == {letter for letter in text if letter.isprintable()}
    assert len(text.splitlines()) <= 24 and max(map(len, text.splitlines())) < 500
    return text


def refused(path):
    return [(row.row, row.field, row.reason) for row in read_examples(recipe(path).dataset).train.refused]


def test_a_row_that_is_too_long_or_nested_deeply_is_refused_and_a_nested_file_not_read(write):
    path = write("rows.jsonl", [{"text": "ok"}, {"text": "a" * 5_000_000}])
    assert refused(path) == [(2, "text", "has 5,000,000 characters; the limit of one row is 4,194,304")]
    for levels in (101, 600, 100_000):
        nested = "[" * levels + "]" * levels
        assert refused(write("rows.jsonl", '{"text": "ok"}\n{"text": ' + nested + "}")) == [(2, None, "is nested too deeply")]
        assert "rows.json: is nested too deeply" in problem(write("rows.json", nested))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("suffix", "begin", "end"), [("jsonl", b'{"text": "', b'"}'), ("csv", b"text\n", b""), ("csv", b'text\n"', b'"\n')]
)
def test_a_line_over_the_limit_is_refused_in_seconds_and_bounded_memory(write, suffix, begin, end):
    import tracemalloc

    path = write(f"rows.{suffix}", begin + b"a" * 40_000_000 + end)
    tracemalloc.start()
    start = time.process_time()
    text = problem(path)
    peak, seconds = tracemalloc.get_traced_memory()[1], time.process_time() - start
    tracemalloc.stop()
    assert "is longer than 32 MiB" in text
    assert seconds < 60 and peak < 200 * 2**20


@pytest.mark.slow
def test_a_json_array_in_one_line_is_read_and_its_giant_row_refused(write):
    path = write("rows.json", b'[{"text": "ok"}, {"text": "' + b"a" * 40_000_000 + b'"}]')
    start = time.process_time()
    rows = read_examples(recipe(path).dataset).train
    assert time.process_time() - start < 60
    assert (len(rows.examples), rows.refused[0].row) == (1, 2)


def test_links_that_lead_in_a_circle_pipes_impossible_names_and_patterns_of_a_whole_disk_are_errors(tmp_path):
    (tmp_path / "a.jsonl").symlink_to(tmp_path / "b.jsonl")
    (tmp_path / "b.jsonl").symlink_to(tmp_path / "a.jsonl")
    os.mkfifo(tmp_path / "pipe.jsonl")
    for name in (str(tmp_path / "a.jsonl"), str(tmp_path / "pipe.jsonl"), "rows\0.jsonl", "r" * 5000 + ".jsonl"):
        with pytest.raises(DataError, match="there is no such file"):
            sources_of(recipe(name).dataset)
    for pattern in ("/**/*.jsonl", "~/**/*.jsonl"):
        with pytest.raises(DataError, match="would search all of"):
            DataFiles.find(pattern)


def test_a_file_that_may_not_be_read_says_so():
    """Asked as another user when the tests run as root, who may read everything."""
    users = os.getresuid()
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "rows.jsonl")
        path.write_text(GOOD)
        path.chmod(0)
        Path(folder).chmod(0o755)
        try:
            if users[1] == 0:
                os.setresuid(65534, 65534, 0)
            text = problem(str(path))
        finally:
            os.setresuid(*users)
    assert "Permission denied" in text and f"chmod u+r {path}" in text


@pytest.mark.slow
def test_a_dataset_that_is_not_local_is_looked_for_on_the_hub_and_the_error_says_so():
    with pytest.raises(DataError, match="nobody/nothing: is not a local file, and the hub can't be reached"):
        list(Source("nobody/nothing").rows())


def test_datasets_are_loaded_like_hub_ones_and_only_in_known_formats(tmp_path, monkeypatch):
    monkeypatch.setattr("datasets.config.HF_DATASETS_CACHE", tmp_path / "cache")
    (tmp_path / "good").mkdir()
    (tmp_path / "good" / "train.jsonl").write_text(GOOD * 2)
    rows = list(read_hub(str(tmp_path / "good"), None, "train", None))
    assert [(row.number, row.values) for row in rows] == [(1, talk("Hi", "Hello")), (2, talk("Hi", "Hello"))]
    with pytest.raises(DataError, match='Unknown split "test"') as error:
        list(read_hub(str(tmp_path / "good"), None, "test", None))
    assert "dataset.split" in error.value.fix
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "a.txt").write_text("a")
    with pytest.raises(DataError, match="of kind text"):
        list(read_hub(str(tmp_path / "other"), None, "train", None))


_JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(st.sampled_from(["role", "content", "from", "value", "x"]), inner, max_size=3)
    ),
    max_leaves=6,
)
#: Columns that formats are recognised by.
_FIELDS = ["messages", "conversations", "instruction", "input", "output", "prompt", "completion", "text", "system", "tools"]
_ROWS = st.lists(st.dictionaries(st.sampled_from(_FIELDS), _JSON, max_size=4) | _JSON, max_size=5)


def _check_rows_or_data_error(path) -> None:
    """Either rows, all of them accounted for, or a DataError that names the file."""
    try:
        rows = read_examples(recipe(path).dataset).train
    except DataError as error:
        text = "\n".join([*error.problems, error.fix])
        assert Path(path).name in text and error.fix
        assert all(letter.isprintable() or letter == "\n" for letter in text)
        return
    assert rows.rows_read == len(rows.examples) + len(rows.refused)
    for row in rows.refused:
        assert row.file == path and row.row >= 1 and row.reason and str(row).isprintable()


_HEALTH = {"deadline": None, "suppress_health_check": [HealthCheck.function_scoped_fixture]}


@pytest.mark.slow
@settings(max_examples=200, **_HEALTH)
@given(rows=_ROWS, suffix=st.sampled_from(["jsonl", "json"]), lines=st.booleans())
def test_200_files_of_any_json_give_rows_or_a_named_problem(write, rows, suffix, lines):
    text = "\n".join(map(json.dumps, rows)) if lines else json.dumps(rows)
    _check_rows_or_data_error(write(f"generated.{suffix}", text.encode("utf-8", "surrogatepass")))


@settings(max_examples=200, **_HEALTH)
@given(
    suffix=st.sampled_from(["jsonl", "json", "csv"]),
    damage=st.lists(
        st.tuples(st.floats(0, 1), st.sampled_from(["cut", "insert", "double", "null"]), st.binary(max_size=6)), max_size=4
    ),
    rows=st.integers(1, 4),
)
def test_200_damaged_text_files_give_rows_or_a_named_problem(write, suffix, damage, rows):
    good = [{"prompt": f'Frage {n} "ü"', "completion": "Ja,\n🙂"} for n in range(rows)]
    cells = "".join(f'"Frage {n} ""ü""","Ja,\n🙂"\n' for n in range(rows))
    texts = {"jsonl": "\n".join(map(json.dumps, good)), "json": json.dumps(good), "csv": "prompt,completion\n" + cells}
    content = texts[suffix].encode()
    for share, kind, extra in damage:
        offset = int(share * len(content))
        content = {
            "cut": content[:offset], "insert": content[:offset] + extra + content[offset:],
            "double": content[:offset] + content[offset // 2 :], "null": content[:offset] + b"\0" + content[offset + 1 :],
        }[kind]  # fmt: skip
    _check_rows_or_data_error(write(f"damaged.{suffix}", content))


def test_200_damaged_parquet_files_give_rows_or_a_named_problem(write, tmp_path):
    parquet.write_table(
        pa.Table.from_pylist([{"prompt": f"Frage {n}", "completion": "Ja"} for n in range(20)]), tmp_path / "good.parquet"
    )
    good, rng = (tmp_path / "good.parquet").read_bytes(), random.Random(0)
    for _ in range(200):
        damaged = bytearray(good[: rng.choice([len(good), rng.randrange(len(good))])])
        for _ in range(rng.randrange(4)):
            if damaged:
                damaged[rng.randrange(len(damaged))] = rng.randrange(256)
        _check_rows_or_data_error(write("damaged.parquet", bytes(damaged)))


@pytest.mark.parametrize("seed", [7, pytest.param(1, marks=pytest.mark.slow)])
def test_generated_files_are_asked_about_or_read_rightly(tmp_path, seed):
    samples = [cases(seed) for cases in (column_cases, field_cases, split_cases)]
    samples = [cases[::2] if seed == 1 else random.Random(7).sample(cases, 60) for cases in samples]
    assert sum(map(len, samples)) > (1_000 if seed == 1 else 100)
    assert not problems(*samples, tmp_path)
