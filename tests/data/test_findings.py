"""Findings in data: their count, first rows and fix; and none in clean data."""

import json

import pytest
from small_data import CHATML, CHATML_MARKED, build_tokenizer, prepare, recipe, talk

from finetune.data.report import Refused, refusal_lines
from finetune.errors import DataError

CLEAN = [talk(f"Question {n}?", f"Answer {n}, à la carte.") for n in range(30)]


def report_of(write, rows, **options):
    return prepare(
        recipe(write("rows.jsonl", rows), **options), build_tokenizer(), max_length=options.pop("limit", None)
    ).report


def test_clean_rows_have_no_finding_and_a_short_account(write):
    report = report_of(write, CLEAN)
    assert (report.findings, report.account()) == ((), "30 rows read: 30 used")


@pytest.mark.parametrize("template", [CHATML, CHATML_MARKED])
def test_a_system_turn_at_an_end_that_the_template_drops_is_reported(write, template):
    first_only = template.replace("for message in messages", "for message in messages if message['role'] != 'system'")
    turn = {"role": "system", "content": "Be terse."}
    turns = [[turn, *row["messages"]] if template == CHATML else [*row["messages"], turn] for row in CLEAN]
    rows = [{"messages": messages} for messages in turns]
    [finding] = prepare(recipe(write("rows.jsonl", rows)), build_tokenizer(first_only), max_length=None).report.findings
    assert (finding.kind, finding.rows) == ("altered", 30)


@pytest.mark.parametrize(("long_rows", "reported"), [(1, False), (2, True)])
def test_more_than_a_hundredth_of_cut_rows_is_found(write, long_rows, reported):
    rows = [talk(f"{n}?", f"{n}") for n in range(100 - long_rows)] + [talk("?", "long " * 80)] * long_rows
    path = write("rows.jsonl", rows)
    report = prepare(recipe(path, excess_length="truncate", test_split_size=0), build_tokenizer(), max_length=64).report
    assert ("truncated" in [finding.kind for finding in report.findings]) == reported
    assert report.rows_truncated == long_rows


def test_every_row_is_in_the_account_with_its_reason(write):
    rows = [*CLEAN[:5], *([talk("q", "")] * 3), *([talk("q", "a " * 60)] * 2), {"other": 1}]
    path = write("rows.jsonl", rows)
    report = prepare(
        recipe(path, on_bad_rows="skip", excess_length="drop", test_split_size=1), build_tokenizer(), max_length=64
    ).report
    assert report.account() == (
        "11 rows read: 4 used, 4 refused (3 x messages[].content the answer is empty, 1 x messages is missing), "
        "2 dropped (longer than max_length), 1 held out"
    )
    assert json.loads(json.dumps(report.as_json()))["account"] == report.account()


def test_refused_rows_are_counted_by_reason_whatever_their_number():
    rows = [Refused("a.jsonl", n, "text", "is empty") for n in range(1, 101)]
    rows += [Refused("a.jsonl", 200 + n, f"field{n}", "is missing") for n in range(15)]
    lines = refusal_lines(rows, 300)
    assert lines[:2] == ["115 of 300 row(s) can't be trained on:", "  100 x text: is empty (a.jsonl, row 1, 2, 3, ...)"]
    assert lines[-1] == "  and 6 other reason(s), for 6 row(s)"
    assert len(lines) <= 12


@pytest.mark.parametrize(
    ("kind", "rows", "settings"),
    [
        ("replaced", [talk(f"Question {n}?", f"A caf\ufffd, {n}.") for n in range(30)], {}),
        ("leak", CLEAN, {"eval_path": "rows.jsonl"}),
        ("truncated", [talk("?", f"{n} long " * 80) for n in range(30)], {"excess_length": "truncate"}),
    ],
)
def test_data_that_nothing_right_is_learnt_of_stops_a_run_until_it_is_accepted(write, tmp_path, kind, rows, settings):
    path = write("rows.jsonl", rows)
    settings = {name: str(tmp_path / value) if name == "eval_path" else value for name, value in settings.items()}
    with pytest.raises(DataError) as error:
        prepare(recipe(path, **settings), build_tokenizer(), max_length=64)
    assert f"dataset.accept_findings=[{kind}]" in error.value.fix and "row" in error.value.problems[0]
    accepted = prepare(recipe(path, **settings, accept_findings=[kind]), build_tokenizer(), max_length=64)
    assert kind in [finding.kind for finding in accepted.report.findings if finding.blocks]
