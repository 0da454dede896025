"""Every row that can't be trained on is named with file, row, field and reason; none is dropped silently."""

import pytest
from small_data import build_tokenizer, prepare, read_examples, recipe, talk

from finetune.data import template
from finetune.errors import DataError, RecipeError

GOOD = talk("Hi", "Hello")
U, A = {"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Hello"}


def refused(path, **settings):
    return [(row.row, row.field, row.reason) for row in read_examples(recipe(path, **settings).dataset).train.refused]


@pytest.mark.parametrize(
    ("line", "field", "reason"),
    [
        ("{not json", None, "is not JSON: Expecting property name"),
        ("[1, 2]", None, "is a list, not an object"),
        ('{"messages": [], "messages": []}', None, "has the key messages more than once"),
        ("null", None, "is null, not an object"),
        ('{"other": 1}', "messages", "is missing; the row has other and the file is read as messages"),
        ('{"messages": null}', "messages", "is missing"),
        ('{"messages": []}', "messages", "is empty"),
        ('{"messages": {}}', "messages", "is an object, not a list of messages"),
        ('{"messages": "Hi"}', "messages", "is text that isn't JSON: 'Hi'"),
        ('{"messages": ["Hi"]}', "messages[0]", "is text, not a message"),
        ('{"messages": [{"content": "Hi"}]}', "messages[0].role", "is missing"),
        ('{"messages": [{"role": 1, "content": "Hi"}]}', "messages[0].role", "is the number 1"),
        ('{"messages": [{"role": "asistant", "content": "Hi"}]}', "messages[0].role", "did you mean assistant?"),
        ('{"messages": [{"role": "user"}, {"role": "assistant", "content": "x"}]}', "messages[0].content", "is missing"),
        ('{"messages": [{"role": "user", "content": " "}]}', "messages[0].content", "is empty"),
        ('{"messages": [{"role": "user", "content": NaN}]}', "messages[0].content", "is NaN"),
        ('{"messages": [{"role": "user", "content": Infinity}]}', "messages[0].content", "is the number inf, not text"),
        ('{"messages": [{"role": "user", "content": "a \\ud83d b"}]}', "messages[0].content", "lone surrogate"),
        ('{"messages": [{"role": "user", "content": [{"type": "video"}]}]}', "messages[0].content[0]", "only text and pict"),
        ('{"messages": [{"role": "user", "content": "Hi"}]}', "messages", "no assistant turn"),
        ('{"messages": [{"role": "system", "content": "Hi"}]}', "messages", "only a system prompt"),
        ('{"messages": [{"role": "assistant", "content": "Hi"}]}', "messages[0].role", "the assistant speaks first"),
        (
            '{"messages": [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": ""}]}',
            "messages[1].content",
            "the answer is empty",
        ),
        ('{"messages": ' + "[" * 100_000 + "]" * 100_000 + "}", None, "is nested too deeply"),
        ('{"messages": ' + "9" * 5000 + "}", None, "a number with too many digits"),
        ('{"messages": [{"role": "user", "content": "a\x01b"}]}', None, "is not JSON: Invalid control character"),
    ],
)
def test_a_bad_line_among_good_ones_is_named(write, line, field, reason):
    import json

    path = write("rows.jsonl", json.dumps(GOOD) + "\n" + line + "\n" + json.dumps(GOOD) + "\n")
    [(row, refused_field, refused_reason)] = refused(path)
    assert (row, refused_field) == (2, field)
    assert reason in refused_reason


def test_bytes_that_are_not_utf8_are_named_with_the_byte(write):
    path = write("rows.jsonl", b'{"text": "ok"}\n{"text": "gr\xfc\xdfe"}\n')
    assert refused(path) == [(2, "text", "is not UTF-8: byte 0xfc at character 3")]
    path = write("rows.csv", b"prompt,completion\nok,ok\ngr\xfc\xdfe,x\n")
    assert refused(path) == [(3, "prompt", "is not UTF-8: byte 0xfc at character 3")]


def test_csv_rows_that_do_not_fit_the_header_are_named(write):
    path = write("rows.csv", 'prompt,completion\na,b,c\na\n,b\n#N/A,b\na,#N/A\n"a"x,b\na,b\n')
    reasons = refused(path)
    assert reasons[:5] == [
        (2, None, "has too many cells: 3, and the header has 2"),
        (3, None, "has too few cells: 1, and the header has 2"),
        (4, "prompt", "is empty"),
        (5, "prompt", "is NaN"),
        (6, "completion", "is NaN"),
    ]
    assert reasons[5][:2] == (7, None) and "is not CSV" in reasons[5][2]


def test_a_row_of_five_million_characters_is_refused_at_once(write):
    path = write("rows.jsonl", [{"text": "ok"}, {"text": "a" * 5_000_000}])
    assert refused(path) == [(2, "text", "has 5,000,000 characters; the limit of one row is 4,194,304")]


def test_bad_rows_stop_everything_by_default_and_say_how_to_skip_them(write):
    path = write("rows.jsonl", [GOOD, *({"messages": [U]} for _ in range(30)), *({"messages": []} for _ in range(3))])
    with pytest.raises(DataError) as error:
        prepare(recipe(path), build_tokenizer(), max_length=None)
    assert error.value.exit_code == 4
    assert error.value.problems == [
        "33 of 34 row(s) can't be trained on:",
        f"  30 x messages: has no assistant turn; there is nothing to train on ({path}, row 2, 3, 4, ...)",
        f"  3 x messages: is empty ({path}, row 32, 33, 34)",
    ]
    assert "on_bad_rows: skip" in error.value.fix


def test_skipped_rows_are_counted_and_listed_in_the_report(write):
    path = write("rows.jsonl", [GOOD, {"messages": [A]}, GOOD])
    report = prepare(recipe(path, on_bad_rows="skip"), build_tokenizer(), max_length=None).report.as_json()
    assert (report["rows_read"], report["rows_used"], report["duplicate_rows"]) == (3, 2, 1)
    [row] = report["rows_refused"]
    assert {name: row[name] for name in ("file", "row", "field")} == {"file": path, "row": 2, "field": "messages[0].role"}
    assert "speaks first" in row["reason"]


def test_no_usable_row_is_an_error_even_when_bad_rows_are_skipped(write):
    path = write("rows.jsonl", [{"messages": [U]}])
    with pytest.raises(DataError, match="no row is left to train on"):
        prepare(recipe(path, on_bad_rows="skip"), build_tokenizer(), max_length=None)


def test_a_report_can_be_had_of_rows_that_are_all_bad(write):
    prepared = prepare(recipe(write("rows.jsonl", [{"messages": [U]}])), build_tokenizer(), max_length=None, report_only=True)
    assert (prepared.report.rows_used, len(prepared.report.rows_refused), len(prepared.train)) == (0, 1, 0)
    assert prepared.report.trained_token_share is None


def test_a_row_that_the_template_refuses_is_named_with_the_templates_message(write):
    picky = "{% if messages[0]['role'] == 'system' %}{{ raise_exception('No system role here') }}{% endif %}ok"
    path = write("rows.jsonl", [talk("Hi", "Hello", system="Be brief.")])
    with pytest.raises(DataError, match="row 1: messages: the chat template refuses it: No system role here"):
        prepare(recipe(path), build_tokenizer(picky), max_length=None)


def test_a_template_that_never_ends_is_ended(write, monkeypatch):
    monkeypatch.setattr(template, "RENDER_S", 0.5)
    endless = "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}"
    with pytest.raises(RecipeError, match="the chat template takes more than"):
        prepare(recipe(write("rows.jsonl", [GOOD])), build_tokenizer(endless), max_length=None)


@pytest.mark.parametrize("bomb", ["{{ 9**(9**9) }}", "{{ 'a' * 10000000000 }}", "{{ 'a' * 99999 * 99999 }}"])
def test_a_template_that_fills_the_memory_while_it_compiles_is_refused(write, bomb):
    with pytest.raises(RecipeError, match="line 1 of the chat template multiplies to more than"):
        prepare(recipe(write("rows.jsonl", [GOOD])), build_tokenizer(bomb), max_length=None)


def test_a_tool_call_that_the_template_does_not_write_is_a_bad_row(write):
    call = {"type": "function", "function": {"name": "find_order", "arguments": "{}"}}
    path = write("rows.jsonl", [{"messages": [U, {"role": "assistant", "content": None, "tool_calls": [call]}]}])
    with pytest.raises(DataError, match=r"row 1: messages\[1\]: the chat template leaves out its call of the tool find_order"):
        prepare(recipe(path), build_tokenizer(), max_length=None)
