"""From a recipe to the trainer's datasets: every row is counted, lengths are kept, results are reproducible."""

import json
import subprocess
import sys

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


def test_a_template_that_would_take_minutes_is_refused_and_one_that_never_ends_is_ended(write, monkeypatch):
    monkeypatch.setattr(template, "RENDER_S", 0.5)
    endless = "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}"
    long = "{# " + "x" * 1_000_000 + " #}"
    for text, problem in ((long, "1,000,006 characters"), (endless, "the chat template takes more than")):
        with pytest.raises(RecipeError, match=problem):
            prepare(recipe(write("rows.jsonl", rows_of(1))), build_tokenizer(text), max_length=None)


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


READING = """
from finetune.data.token_cache import SourceReader; from finetune.recipe import load_recipe
from finetune.data.sources import sources_of; dataset = load_recipe('tiny-cpu').dataset
list(SourceReader(sources_of(dataset)[0][0], dataset, None).parsed())
"""


@pytest.mark.parametrize(
    ("code", "heavy"),
    [
        ("import finetune.bundled, finetune.data.report", ("torch", "transformers", "datasets", "trl", "numpy")),
        (READING, ("PIL",)),
    ],
)
def test_importing_the_data_package_loads_no_heavy_library_and_reading_text_not_pillow(code, heavy):
    code = f"{code}\nimport sys; print([name for name in {heavy} if name in sys.modules])"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.strip() == "[]"
