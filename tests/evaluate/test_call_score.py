"""Calls are scored by name and JSON value; a tune that calls without need is worse, and the report says so first."""

import calls_run
import pytest
from calls_run import call

from finetune.bundled import NO_CALL_PROBE
from finetune.data.call_syntax import Answer
from finetune.evaluate.call_score import ARGUMENTS, COUNT, KNOWN_TOOL, NAMES, NO_CALL_DUE, ORDER, call_score

TOOLS = [
    {"type": "function", "function": {"name": "f", "parameters": {"properties": {"unit": {"type": "string", "default": "C"}}}}},
    {"type": "function", "function": {"name": "g", "parameters": {}}},
]


@pytest.mark.parametrize(
    ("expected", "answered", "score"),
    [
        ([call("f", a=1, b="x")], [call("f", b="x", a=1)], 1),
        ([call("f", a=1)], [call("f", a=1.0)], 1),
        ([call("f", a=1)], [call("f", a=True)], 0),
        ([call("f", a=1)], [call("f", a="1")], 0),
        ([call("f", a={"b": [1, 2]})], [call("f", a={"b": [2, 1]})], 0),
        ([call("f", a=1)], [call("f", a=1, unit="C")], 1),
        ([call("f", a=1, unit="C")], [call("f", a=1)], 1),
        ([call("f", a=1)], [call("f", a=1, unit="F")], 0),
        ([call("f", a=1)], [call("g", a=1)], 0),
        ([call("f"), call("g")], [call("g"), call("f")], 1),
        ([call("f"), call("f")], [call("f")], 0),
        ([call("f")], [call("f"), call("f")], 0),
        ([call("f")], [], 0),
        ([], [], 1),
        ([], [call("f")], 0),
    ],
)
def test_calls_are_right_by_name_and_json_value_in_any_order(expected, answered, score):
    assert call_score(expected, TOOLS, Answer("", answered)).score == score


def test_the_parts_of_the_score_say_what_is_wrong():
    expected = [call("f", a=1), call("g")]
    fields = call_score(expected, TOOLS, Answer("", [call("g"), call("f", a=2)])).fields
    assert fields == {
        KNOWN_TOOL: True, NAMES: True, ARGUMENTS: False, COUNT: True, ORDER: False, "tool f": False, "tool g": True,
    }  # fmt: skip
    assert call_score([call("f")], TOOLS, Answer("", [call("h")])).fields[KNOWN_TOOL] is False
    unreadable = call_score([], TOOLS, Answer("<tool_call>{", is_unreadable=True))
    assert (unreadable.valid, unreadable.fields[NO_CALL_DUE]) == (False, False)


def test_the_bundled_questions_are_thirty_and_each_has_tools():
    from finetune.files import parse_json

    rows = [parse_json(line) for line in NO_CALL_PROBE.read_text(encoding="utf-8").splitlines()]
    assert len({row["prompt"] for row in rows}) == 30 and all(row["tools"] for row in rows)


@pytest.mark.slow
def test_a_tune_that_always_calls_is_worse_where_no_call_is_due_and_the_report_says_so_first(tmp_path, capsys, finetune):
    from app.report import page
    from finetune.evaluate.forgetting import measure_no_call
    from finetune.evaluate.results import read_evaluations
    from finetune.evaluate.score import compare
    from finetune.run.directory import RunDirectory

    held_out = tmp_path / "held-out.jsonl"
    calls_run.write_rows(held_out, [calls_run.ONE, *[calls_run.NO_CALL] * 8])
    questions = {"Who is it?": "Rom", "What is 3 + 4?": "Ulm", "Write a letter.": "Paris", "How do I get there?": "Lima"}
    always = [[calls_run.user(text), calls_run.assistant("", call("weather", city=city))] for text, city in questions.items()]
    run = calls_run.make(tmp_path, (calls_run.ONE, *always), f"dataset.eval_path={held_out}")
    result = compare(RunDirectory(run))
    assert result.score == "calls"
    assert (result.base.fields[NO_CALL_DUE], result.tuned.fields[NO_CALL_DUE]) == (1.0, 0.0)
    assert result.tuned.fields["tool weather"] == 1.0
    assert result.field_differences[NO_CALL_DUE].is_significant
    capsys.readouterr()
    code, shown = finetune("eval", run, "--examples", "0")
    first_lines = "\n".join(shown.out.splitlines()[:8])
    assert code == 0
    assert "worse:" in first_lines and "none due (30): answered without a call 100% before" in " ".join(first_lines.split())
    [evaluation] = read_evaluations(RunDirectory(run)).values()
    assert evaluation["field_differences"][NO_CALL_DUE]["value"] == -1.0
    assert "Worse: questions with tools, none due" in page([RunDirectory(run)])
    assert measure_no_call(RunDirectory(run), pytest.fail).is_worse  # from the file of answers: no model is loaded
