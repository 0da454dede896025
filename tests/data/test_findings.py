"""What the data doctor finds, with its count, its first places and what to do; and nothing in clean data."""

import json

import pytest
from small_data import build_tokenizer, recipe, talk

from finetune.data import prepare
from finetune.data.report import Refused, refusal_lines

CLEAN = [talk(f"Question {n}?", f"Answer {n}, à la carte.") for n in range(30)]


def report_of(write, rows, **options):
    return prepare(
        recipe(write("rows.jsonl", rows), **options), build_tokenizer(), max_length=options.pop("limit", None)
    ).report


def test_clean_rows_have_no_finding_and_a_short_account(write):
    report = report_of(write, CLEAN)
    assert (report.findings, report.account()) == ((), "30 rows read: 30 used")


@pytest.mark.parametrize(
    ("row", "kind"),
    [
        (talk("What is it?", "A caf\ufffd."), "replaced"),
        (talk("What is it?", "A cafÃ©, donâ€™t you see?"), "mojibake"),
        (talk("Stop</s>", "No."), "literal"),
        (talk("Stop", "No.</s>"), "control"),
        (CLEAN[0], "duplicates"),
    ],
)
def test_a_finding_names_its_rows_and_what_to_do(write, row, kind):
    [finding] = report_of(write, [*CLEAN, row, *([] if kind == "duplicates" else [talk("x", "y")])]).findings
    assert (finding.kind, finding.rows) == (kind, 1)
    assert finding.first[0].endswith("rows.jsonl, row 31") and finding.fix


@pytest.mark.parametrize("row", [{"text": "Stop</s> now"}, {"prompt": "Stop</s> ", "completion": "now"}])
def test_special_tokens_in_plain_text_are_told(write, row):
    [finding] = report_of(write, [row]).findings
    assert (finding.kind, finding.rows) == ("control", 1)


def test_the_same_answer_to_everything_is_found(write):
    [finding] = report_of(write, [talk(f"Question {n}?", "Yes.") for n in range(30)] + CLEAN[:1]).findings
    assert (finding.kind, finding.rows) == ("same answer", 30)
    assert "30 row(s) of 31 have the same answer" in str(finding)


@pytest.mark.parametrize(("long", "found"), [(1, False), (2, True)])
def test_more_than_a_hundredth_of_cut_rows_is_found(write, long, found):
    rows = [talk(f"{n}?", f"{n}") for n in range(100 - long)] + [talk("?", "long " * 80)] * long
    path = write("rows.jsonl", rows)
    report = prepare(recipe(path, excess_length="truncate"), build_tokenizer(), max_length=64).report
    assert ("truncated" in [finding.kind for finding in report.findings]) == found
    assert report.rows_truncated == long


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
