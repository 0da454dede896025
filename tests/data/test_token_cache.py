"""Rows are tokenised once: the cache equals reading, is never stale, and survives kills, damage and two writers."""

import json
import os
import signal
import time

import pytest
from small_data import CHATML_MARKED, build_tokenizer, prepare, recipe, talk

from finetune.data import token_cache
from finetune.data.tokens import Encoder
from finetune.errors import DataError, DiskFull, OutOfMemory
from finetune.planner.planning import RowProgress

ROWS = [talk(f"How much is {n} and {n}?", f"It is {n + n}.") for n in range(22)]


@pytest.fixture(autouse=True)
def small_batches(monkeypatch):
    """Every file is cached, in batches of four rows, made in this process."""
    monkeypatch.setattr(token_cache, "SMALL_BYTES", 0)
    monkeypatch.setattr(token_cache, "BATCH_ROWS", 4)
    monkeypatch.setattr(token_cache, "usable_cpus", lambda: 1)


@pytest.fixture
def encoded(monkeypatch):
    """The number of rows that were tokenised, after each call."""
    counts = []
    encode = Encoder.encode
    monkeypatch.setattr(Encoder, "encode", lambda self, rows: counts.append(len(rows)) or encode(self, rows))
    return counts


def shards():
    return sorted(token_cache.cache_folder().rglob("*.arrow"))


def content(data_recipe, tokenizer, **options):
    prepared = prepare(data_recipe, tokenizer, **{"max_length": None} | options)
    return prepared.report.as_json(), prepared.train[:], prepared.fingerprint, prepared.splits[0].examples


@pytest.mark.parametrize("settings", [{}, {"test_split_size": 5}, {"max_rows": 9}, {"excess_length": "truncate"}])
def test_the_cache_gives_what_reading_gives(write, monkeypatch, encoded, settings):
    damaged = [*ROWS, talk("unanswered"), talk("long", "word " * 60), talk("Ã©t\u00e9", "so"), ROWS[0]]
    path, tokenizer = write("rows.jsonl", damaged), build_tokenizer()
    data_recipe = recipe(path, on_bad_rows="skip", **settings)

    def prepared():
        return content(data_recipe, tokenizer, max_length=60 if settings else None, report_only=True)

    first = prepared()
    encoded.clear()
    assert prepared() == first and not encoded
    monkeypatch.setattr(token_cache, "SMALL_BYTES", 2**30)
    assert prepared() == first and encoded


def test_forks_give_the_same_as_one_process(write, monkeypatch):
    data_recipe = recipe(write("rows.jsonl", ROWS))
    monkeypatch.setattr(token_cache, "usable_cpus", lambda: 3)
    forked = content(data_recipe, build_tokenizer())
    monkeypatch.setattr(token_cache, "SMALL_BYTES", 2**30)
    assert content(data_recipe, build_tokenizer()) == forked


def test_an_interrupted_preparation_begins_again(write, encoded):
    data_recipe, tokenizer = recipe(write("rows.jsonl", ROWS)), build_tokenizer()

    def stop_after_twelve(count, total):
        if count >= 12:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        prepare(data_recipe, tokenizer, max_length=None, progress=stop_after_twelve)
    assert sum(encoded) == 12
    assert len(prepare(data_recipe, tokenizer, max_length=None).lengths) == 22
    assert sum(encoded) == 12 + 22


@pytest.mark.parametrize("damage", ["flipped", "cut", "gone", "index"])
def test_damage_is_detected_and_the_rows_are_tokenised_again(write, encoded, damage):
    data_recipe, tokenizer = recipe(write("rows.jsonl", ROWS)), build_tokenizer()
    first = content(data_recipe, tokenizer)
    path = shards()[1]
    if damage == "gone":
        path.unlink()
    else:
        path = path.with_name("source.json") if damage == "index" else path
        data = bytearray(path.read_bytes())
        data[len(data) // 2] ^= 1
        path.write_bytes(data[: len(data) // 2] if damage == "cut" else data)
    encoded.clear()
    assert content(data_recipe, tokenizer) == first
    assert sum(encoded) == 22


def test_whatever_decides_the_tokens_makes_another_entry(write):
    path = write("rows.jsonl", [{**row, "score": 1} for row in ROWS])
    other = write("other.jsonl", [{**row, "score": 1} for row in ROWS[1:]])
    options = {"ignore_columns": ["score"]}
    cases = [
        (recipe(path, **options), build_tokenizer()),
        (recipe(other, **options), build_tokenizer()),
        (recipe(path, **options), build_tokenizer(CHATML_MARKED)),
        (recipe(path, **options), build_tokenizer(extra=("<|more|>",))),
        (recipe(path, **options, train_on_inputs=True), build_tokenizer()),
        (recipe(path, **options, max_rows=8), build_tokenizer()),
        (recipe(path, ignore_columns=["score", "name"]), build_tokenizer()),
    ]
    for number, (data_recipe, tokenizer) in enumerate(cases, 1):
        prepare(data_recipe, tokenizer, max_length=None)
        prepare(data_recipe.model_copy(update={"seed": number}), tokenizer, max_length=512)
        assert len(list(token_cache.cache_folder().iterdir())) == number


def test_a_renamed_file_uses_the_cache_and_is_reported_by_its_new_name(write, encoded):
    rows = [*ROWS, {"messages": 5}]
    prepare(recipe(write("rows.jsonl", rows)), build_tokenizer(), max_length=None, report_only=True)
    encoded.clear()
    moved = write("moved.jsonl", rows)
    report = prepare(recipe(moved), build_tokenizer(), max_length=None, report_only=True).report
    assert not encoded and report.rows_refused[0].file == moved


def test_two_processes_at_once_give_the_same(write):
    data_recipe, tokenizer = recipe(write("rows.jsonl", ROWS)), build_tokenizer()
    children = []
    for _ in range(2):
        if (child := os.fork()) == 0:
            os._exit(0 if prepare(data_recipe, tokenizer, max_length=None).report.rows_used == 22 else 1)
        children.append(child)
    assert [os.waitpid(child, 0)[1] for child in children] == [0, 0]
    assert len(shards()) == 6


def test_an_unused_column_in_a_later_batch_stops_the_run(write, encoded):
    rows = [*ROWS, *({**row, "label": False} for row in ROWS)]
    with pytest.raises(DataError, match=r"unused columns .*: label \(truth values\)"):
        prepare(recipe(write("rows.jsonl", rows)), build_tokenizer(), max_length=None)
    assert sum(encoded) == 20


def test_a_cache_that_can_not_be_written_is_a_problem_of_the_disk(write, tmp_path, monkeypatch):
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("FINETUNE_CACHE", str(tmp_path / "file" / "cache"))
    with pytest.raises(DiskFull, match="can't be written"):
        prepare(recipe(write("rows.jsonl", ROWS)), build_tokenizer(), max_length=None)


def test_a_killed_fork_is_reported_and_the_rows_are_tokenised_next_time(write, monkeypatch):
    data_recipe, parent = recipe(write("rows.jsonl", ROWS)), os.getpid()
    with monkeypatch.context() as patch:
        patch.setattr(token_cache, "usable_cpus", lambda: 2)
        encode = Encoder.encode

        def killed(self, rows):
            if os.getpid() != parent:
                os.kill(os.getpid(), signal.SIGKILL)
            return encode(self, rows)

        patch.setattr(Encoder, "encode", killed)
        with pytest.raises(OutOfMemory, match="was killed"):
            prepare(data_recipe, build_tokenizer(), max_length=None)
    assert prepare(data_recipe, build_tokenizer(), max_length=None).report.rows_used == 22


def test_forks_that_send_large_results_end_when_nobody_reads_on(monkeypatch):
    monkeypatch.setattr(token_cache, "usable_cpus", lambda: 2)
    results = token_cache.results_in_forks(bytes, [(2**23,)] * 6)
    assert len(next(results)) == len(next(results)) == 2**23
    results.close()


def test_progress_messages_have_count_rate_and_time_left(monkeypatch):
    now, messages = [0.0], []
    monkeypatch.setattr(time, "monotonic", lambda: now[0])
    progress = RowProgress(messages.append)
    for now[0], count, total in ((0.1, 10, 1000), (1.0, 250, 1000), (2.0, 500, None)):
        progress(count, total)
    assert messages == ["tokenising rows: 250 of 1,000, 250 per second, 3 s left", "tokenising rows: 500, 250 per second"]


def test_the_cache_is_listed_and_cleared(write, capsys):
    from finetune.cli.doctor import use_cache

    prepare(recipe(write("rows.jsonl", ROWS)), build_tokenizer(), max_length=None)
    use_cache("list", as_json=True)
    assert json.loads(capsys.readouterr().out)["caches"]["tokenised rows"]["bytes"] > 10_000
    use_cache("clear", as_json=True)
    assert not shards()
