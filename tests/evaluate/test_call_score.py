"""Calls are scored by name and JSON value; a tune that calls without need is worse, and the report says so first."""

import json

import pytest

from finetune.data.tool_calls import Answer
from finetune.evaluate.scorers import ARGUMENTS, COUNT, KNOWN_TOOL, NAMES, NO_CALL_DUE, ORDER, call_score

TOOLS = [
    {"type": "function", "function": {"name": "f", "parameters": {"properties": {"unit": {"type": "string", "default": "C"}}}}},
    {"type": "function", "function": {"name": "g", "parameters": {}}},
]
#: A template of the tiny model's tokens with tools and calls, in Qwen's and Hermes' form.
TEMPLATE = """{%- if tools %}<|system|>Tools: {% for tool in tools %}{{ tool.function.name }} {% endfor %}<|end|>{% endif %}
{%- for message in messages %}{%- if message.role == 'assistant' %}<|assistant|>{{ message.content }}
{%- for call in message.tool_calls or [] %}<tool_call>{"name": "{{ call.function.name }}", "arguments":
{{- ' ' + call.function.arguments | tojson }}}</tool_call>{% endfor %}<|end|>
{%- elif message.role == 'tool' %}<|user|><tool_response>{{ message.content }}</tool_response><|end|>
{%- else %}{{ '<|' + message.role + '|>' + message.content + '<|end|>' }}{%- endif %}
{%- endfor %}{%- if add_generation_prompt %}<|assistant|>{%- endif %}"""
PARAMETERS = {"type": "object", "properties": {"city": {"type": "string"}, "days": {"type": "integer"}}, "required": ["city"]}


def call(name, **arguments):
    return {"type": "function", "function": {"name": name, "arguments": arguments}}


def conversation(question, answer, *calls):
    return [{"role": "user", "content": question}, {"role": "assistant", "content": answer, "tool_calls": [*calls]}]


def write_rows(path, conversations):
    functions = [{"name": name, "description": f"The {name}.", "parameters": PARAMETERS} for name in ("weather", "time")]
    tools = [{"type": "function", "function": function} for function in functions]
    path.write_text("".join(json.dumps({"messages": messages, "tools": tools}) + "\n" for messages in conversations))


def trained(folder, conversations, *overrides):
    """A run of the tiny model that has learnt these conversations by heart."""
    from finetune.recipe import load_recipe
    from finetune.run.prepare import create_run, prepare
    from finetune.run.worker import Worker

    data, template = folder / "rows.jsonl", folder / "calls.jinja"
    write_rows(data, conversations)
    template.write_text(TEMPLATE)
    settings = (
        f"dataset.path={data}", f"chat_template={template}", f"output_dir={folder / 'calls'}", "load_in_4bit=false",
        "lora_r=32", "lora_alpha=64", "max_steps=60", "learning_rate=5e-3", "eval_steps=0", "dataset.test_split_size=0",
        "effective_batch_size=5", "per_device_train_batch_size=5", "max_length=512", *overrides,
    )  # fmt: skip
    run = create_run(prepare(load_recipe("tiny-cpu", settings)))
    assert Worker(run).main() == 0
    return run


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


@pytest.mark.slow
def test_a_tune_that_always_calls_is_worse_where_no_call_is_due_and_the_report_says_so_first(tmp_path, capsys, finetune):
    from finetune.evaluate.results import read_evaluations
    from finetune.evaluate.score import compare

    weather = conversation("Weather in Bern?", "", call("weather", city="Bern", days=2))
    held_out = tmp_path / "held-out.jsonl"
    write_rows(held_out, [weather, *[conversation("Good morning!", "Good morning to you.")] * 8])
    questions = {"Who is it?": "Rom", "What is 3 + 4?": "Ulm", "Write a letter.": "Paris", "How do I get there?": "Lima"}
    always = [conversation(text, "", call("weather", city=city)) for text, city in questions.items()]
    run = trained(tmp_path, [weather, *always], f"dataset.eval_path={held_out}")
    result = compare(run)
    assert result.score == "calls"
    assert (result.base.fields[NO_CALL_DUE], result.tuned.fields[NO_CALL_DUE]) == (1.0, 0.0)
    assert result.tuned.fields["tool weather"] == 1.0
    assert result.field_differences[NO_CALL_DUE].is_significant
    capsys.readouterr()
    code, shown = finetune("eval", run.path, "--examples", "0")
    first_lines = "\n".join(shown.out.splitlines()[:8])
    assert code == 0
    assert "worse:" in first_lines and "calls tools in rows that need no call" in " ".join(first_lines.split())
    [evaluation] = read_evaluations(run).values()
    assert evaluation["field_differences"][NO_CALL_DUE]["value"] == -1.0
