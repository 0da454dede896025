"""From a recipe to the trainer's datasets: every row is counted, lengths are kept, results are reproducible."""

import json

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from small_data import CHATML, CHATML_MARKED, build_tokenizer, prepare, recipe, talk

from finetune.data import template
from finetune.data.tokenizer import load_tokenizer
from finetune.data.tokens import Encoder
from finetune.errors import DataError, RecipeError


def rows_of(*lengths):
    return [talk(f"question {index}", "answer " * length) for index, length in enumerate(lengths)]


def test_the_report_counts_rows_tokens_and_their_shares(write, tokenizer):
    prepared = prepare(recipe(write("rows.jsonl", rows_of(1, 2, 3))), tokenizer, max_length=None)
    report = prepared.report
    lengths = [len(row) for row in prepared.train["input_ids"]]
    trained = [sum(label != -100 for label in row) for row in prepared.train["labels"]]
    assert prepared.lengths == lengths and prepared.train.column_names == ["input_ids", "labels"]
    assert (report.rows_read, report.rows_used, report.sequences) == (3, 3, 3)
    assert (report.total_tokens, report.trained_tokens) == (sum(lengths), sum(trained))
    assert report.as_json()["trained_token_share"] == sum(trained) / sum(lengths)
    assert report.lengths == {"p50": sorted(lengths)[1], "p95": max(lengths), "p99": max(lengths), "max": max(lengths)}
    assert json.loads(json.dumps(report.as_json()))["format"] == "messages"


@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    kinds=st.lists(st.sampled_from(["short", "long", "long question", "bad", "not json"]), min_size=1, max_size=12),
    excess=st.sampled_from(["drop", "truncate", "raise"]),
    held_out=st.sampled_from([0, 1, 0.3]),
)
def test_no_row_ever_goes_missing_from_the_account(write, tokenizer, kinds, excess, held_out):
    lines = {
        "short": json.dumps(talk("q", "a")), "long": json.dumps(talk("q", "a " * 50)),
        "long question": json.dumps(talk("q " * 50, "a")), "bad": json.dumps(talk("q", "")), "not json": "{",
    }  # fmt: skip
    path = write("rows.jsonl", "\n".join(lines[kind].replace('"q', f'"{n} q', 1) for n, kind in enumerate(kinds)))
    settings_ = {"excess_length": excess, "on_bad_rows": "skip", "test_split_size": held_out}
    try:
        prepared = prepare(recipe(path, **settings_), tokenizer, max_length=40, report_only=True)
    except DataError:
        assert held_out or set(kinds) <= {"not json"}
        return
    reports = [report for report in (prepared.report, prepared.eval_report) if report]
    for report in reports:
        left_out = report.rows_too_long - report.rows_truncated
        assert report.rows_read == report.rows_used + len(report.rows_refused) + report.rows_held_out + left_out
    assert prepared.report.rows_read == len(kinds)
    assert max([0, *(length for split in prepared.splits for length in split.lengths)]) <= 40
    for row in prepared.train:
        trained = [label == token for token, label in zip(row["input_ids"], row["labels"], strict=True) if label != -100]
        assert trained and all(trained) and row["labels"][0] == -100


def test_rows_are_held_out_by_seed_and_duplicates_stay_together(write, tokenizer):
    path = write("rows.jsonl", rows_of(*range(1, 21)) + rows_of(*range(1, 21)))

    def split(size, seed):
        chosen = recipe(path, test_split_size=size).model_copy(update={"seed": seed})
        prepared = prepare(chosen, tokenizer, max_length=None)
        return prepared.report.rows_held_out, prepared.splits[0].examples, prepared.splits[1].examples

    (count, train, held_out), (_, _, repeated), (_, _, other) = split(0.25, 1), split(0.25, 1), split(0.25, 2)
    assert len(held_out) == count == 10
    assert [example.row for example in held_out] == [example.row for example in repeated] != [example.row for example in other]
    trained, asked = ({example.question()[0]["content"] for example in examples} for examples in (train, held_out))
    assert not trained & asked
    assert len(split(4, 1)[2]) == 4


def test_the_fingerprint_is_the_same_for_the_same_and_another_for_anything_that_changes_tokens(write, tmp_path):
    path = write("rows.jsonl", rows_of(1, 2, 30))
    (tmp_path / "copy.jsonl").write_bytes((tmp_path / "rows.jsonl").read_bytes())

    def print_of(path=path, template=CHATML, max_length=None, extra=(), **settings):
        return prepare(recipe(path, **settings), build_tokenizer(template, extra=extra), max_length=max_length).fingerprint

    equal = {print_of(), print_of(), print_of(path=str(tmp_path / "copy.jsonl")), print_of(seed=7)}
    different = {
        print_of(path=write("other.jsonl", rows_of(1, 2, 31))), print_of(template=CHATML_MARKED), print_of(extra=("<x>",)),
        print_of(train_on_inputs=True), print_of(max_length=16, excess_length="truncate"), print_of(max_rows=2),
    }  # fmt: skip
    assert len(equal) == 1 and len(different) == 6 and not equal & different
    tokenizer = build_tokenizer()
    tokenizer(["a", "b c d"], padding=True, truncation=True, max_length=2)
    assert prepare(recipe(path), tokenizer, max_length=None).fingerprint in equal


def test_progress_ends_at_the_number_of_rows(write, tokenizer):
    reports = []
    path, eval_path = write("rows.jsonl", rows_of(*[1] * 300)), write("eval.jsonl", rows_of(2, 2))
    prepare(recipe(path, eval_path=eval_path), tokenizer, max_length=None, progress=lambda *counts: reports.append(counts))
    assert reports == [(300, 302), (302, 302)]


def test_a_template_that_would_take_minutes_is_refused(write):
    with pytest.raises(RecipeError, match="1,000,006 characters"):
        prepare(recipe(write("rows.jsonl", rows_of(1))), build_tokenizer("{# " + "x" * 1_000_000 + " #}"), max_length=None)


def test_a_template_that_never_ends_is_ended(write, monkeypatch):
    monkeypatch.setattr(template, "RENDER_S", 0.5)
    endless = "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}"
    with pytest.raises(RecipeError, match="the chat template takes more than"):
        prepare(recipe(write("rows.jsonl", rows_of(1))), build_tokenizer(endless), max_length=None)


def test_a_template_runs_only_in_the_sandbox(write):
    escape = "{{ ''.__class__.__mro__[1].__subclasses__() }}{% for m in messages %}{{ m['content'] }}{% endfor %}"
    with pytest.raises(DataError, match="the chat template refuses it"):
        prepare(recipe(write("rows.jsonl", rows_of(1))), build_tokenizer(escape), max_length=None)


def test_the_bundled_rows_are_all_used_and_held_out_prompts_have_the_tokens_of_training():
    data_recipe = recipe("support", model_name_or_path="tiny")
    tokenizer = load_tokenizer(data_recipe)
    prepared = prepare(data_recipe, tokenizer, max_length=512)
    for report in (prepared.report, prepared.eval_report):
        assert report.rows_used == report.rows_read == report.sequences
        assert not report.warnings and not report.rows_refused
    assert prepared.report.rows_used >= 600 and prepared.eval_report.rows_used >= 100
    encoder = Encoder(tokenizer)
    for example, row in zip(prepared.splits[1].examples, prepared.eval, strict=True):
        prompt_ids = encoder.prompt_ids(example.question())
        assert row["input_ids"][: len(prompt_ids)] == prompt_ids
        assert row["labels"] == [-100] * len(prompt_ids) + row["input_ids"][len(prompt_ids) :]
        assert tokenizer.decode(row["input_ids"][len(prompt_ids) :]) == f"{example.reference()}{tokenizer.eos_token}"


def test_importing_the_data_package_loads_no_heavy_library():
    import subprocess
    import sys

    heavy = ("torch", "transformers", "datasets", "trl", "numpy")
    code = f"import sys, finetune.data, finetune.data.report; print([name for name in {heavy} if name in sys.modules])"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.strip() == "[]"


TOKENIZER = build_tokenizer()


def prepared(path, max_length=None, **settings):
    return prepare(recipe(path, **settings), TOKENIZER, max_length=max_length)


def ids_of(prepared_data):
    return [row["input_ids"] for row in prepared_data.train]


def test_a_long_text_is_cut_into_even_chunks_without_losing_a_token(write):
    path = write("rows.jsonl", [{"text": f"{n} word " * n} for n in (90, 40, 1)])
    uncut, chunked = prepared(path), prepared(path, 32, excess_length="chunk")
    lengths = [len(ids) for ids in ids_of(chunked)]
    assert lengths == chunked.lengths and max(lengths) <= 32 and min(lengths[:-1]) >= 16
    assert sum(ids_of(chunked), []) == sum(ids_of(uncut), [])
    assert all(row["labels"][0] == -100 and row["labels"][1:] == row["input_ids"][1:] for row in chunked.train)
    assert chunked.report.trained_tokens == sum(label != -100 for row in chunked.train for label in row["labels"])
    assert (chunked.report.rows_used, chunked.report.rows_chunked, chunked.report.sequences) == (3, 2, len(lengths))
    assert "2 cut into chunks" in chunked.report.account()


@pytest.fixture
def files(write):
    """Two files of 10 rows each."""
    return [write(f"{name}.jsonl", [{"text": f"{name} {n}"} for n in range(10)]) for name in ("a", "b")]


def counts(prepared_data):
    texts = [TOKENIZER.decode(ids, skip_special_tokens=True).strip() for ids in ids_of(prepared_data)]
    return [sum(text.startswith(name) for text in texts) for name in ("a", "b")], texts


def test_weights_say_how_often_rows_are_used_and_every_row_is_counted(files):
    weighted = prepared(files, weights=[0.3, 2.5], seed=1)
    [from_a, from_b], texts = counts(weighted)
    assert (from_a, from_b) == (3, 25) and len({text for text in texts if text.startswith("b")}) == 10
    report = weighted.report
    assert (report.rows_read, report.rows_used, report.rows_left_out, report.rows_repeated) == (20, 13, 7, 15)
    assert "7 left out (dataset.weights)" in report.account() and "15 times a row is used again" in report.account()
    assert weighted.lengths == [len(ids) for ids in ids_of(weighted)] and report.total_tokens == sum(weighted.lengths)
    assert report.trained_tokens == sum(label != -100 for row in weighted.train for label in row["labels"])


def test_the_same_seed_chooses_the_same_rows_and_another_seed_others(files):
    first, repeated, other = (prepared(files, weights=[0.5, 1], seed=seed) for seed in (1, 1, 2))
    assert ids_of(first) == ids_of(repeated) and first.fingerprint == repeated.fingerprint
    assert counts(first)[1] != counts(other)[1] and first.fingerprint != other.fingerprint


def test_weights_are_one_for_each_path_and_not_for_held_out_rows(files):
    split_data = prepared(files, weights=[2, 2], test_split_size=4)
    assert len(split_data.eval) == 4 and len(split_data.train) == 32
    with pytest.raises(RecipeError, match=r"2 number\(s\) for 1 path"):
        prepared(files[0], weights=[1, 2])
    for weights in ([0, 1], [-1, 1], [101, 1]):
        with pytest.raises(RecipeError, match="weights"):
            prepared(files, weights=weights)
