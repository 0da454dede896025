"""A call of a tool, however a file writes it, is trained in the model's own form and parses back to the same arguments."""

import json
import re

import pytest
from small_data import build_tokenizer, read_examples, recipe, trained_text
from test_published_templates import FOLDER, tokenizer_of_all

from finetune.data.tokens import Encoder

ARGUMENTS = {"city": 'Zürich "HB"', "days": 3, "exact": True, "at": {"lat": 47.4, "tags": ["a", "b"]}}
TOOL = {"name": "get_weather", "description": "Weather.", "parameters": {"type": "object", "properties": {}}}
CALL = {"name": "get_weather", "arguments": ARGUMENTS}
TEXT_CALL = {"name": "get_weather", "arguments": json.dumps(ARGUMENTS)}
END = [{"from": "gpt", "value": "Sunny."}]
HERMES = (
    "You are a function calling AI model. You are provided with function signatures within <tools> </tools> XML tags. "
    f"Here are the available tools: <tools> {json.dumps([TOOL])} </tools> For each function call return a json object within "
    "<tool_call></tool_call> XML tags as follows:\n"
    "<tool_call>\n{'arguments': <args-dict>, 'name': <function-name>}\n</tool_call>"
)


def openai(call, **more):
    turns = [
        {"role": "user", "content": "Weather?"},
        {"role": "assistant", "content": None, "tool_calls": [{"id": "call_1", "type": "function", "function": call}]},
        {"role": "tool", "tool_call_id": "call_1", "content": '{"sky": "blue"}'},
        {"role": "assistant", "content": "Sunny."},
    ]
    return {"messages": turns, "tools": [{"type": "function", "function": TOOL}], **more}


SHAPES = {
    "openai, arguments as text": openai(TEXT_CALL),
    "openai, arguments as an object": openai(CALL),
    "openai, all as text": {name: json.dumps(value) for name, value in openai(TEXT_CALL).items()},
    "openai, before tool_calls": {
        "messages": [
            {"role": "user", "content": "Weather?"},
            {"role": "assistant", "content": None, "function_call": TEXT_CALL},
            {"role": "function", "name": "get_weather", "content": '{"sky": "blue"}'},
            {"role": "assistant", "content": "Sunny."},
        ],
        "functions": [TOOL],
    },
    "LLaMA-Factory": {
        "conversations": [
            {"from": "human", "value": "Weather?"},
            {"from": "function_call", "value": json.dumps(CALL)},
            {"from": "observation", "value": '{"sky": "blue"}'},
            *END,
        ],
        "tools": json.dumps([TOOL]),
    },
    "xLAM": {
        "query": "Weather?",
        "tools": json.dumps([{**TOOL, "parameters": {"city": {"type": "str, optional", "description": "Where."}}}]),
        "answers": json.dumps([CALL]),
    },
    "Hermes": {
        "conversations": [
            {"from": "system", "value": HERMES},
            {"from": "human", "value": "Weather?"},
            {"from": "gpt", "value": f"<tool_call>\n{CALL}\n</tool_call>"},
            {"from": "tool", "value": '<tool_response>\n{"sky": "blue"}\n</tool_response>'},
            *END,
        ],
    },
}


def encoded(write, row, template):
    tokenizer = tokenizer_of_all()
    tokenizer.chat_template = (FOLDER / f"{template}.jinja").read_text(encoding="utf-8")
    rows = read_examples(recipe(write("rows.jsonl", [row])).dataset).train
    assert not rows.refused
    return Encoder(tokenizer).encode(rows.examples)[0], tokenizer


#: As Mistral's templates of 7B v0.3 and Nemo write calls and replies.
MISTRAL = """{%- for message in messages %}{%- if message.role == "user" %}{{- "[INST] " + message.content + "[/INST]" }}
{%- elif message.tool_calls is defined and message.tool_calls %}{{- "[TOOL_CALLS] [" }}{%- for call in message.tool_calls %}
{{- (call.function|tojson)[:-1] }}{%- if not call.id is defined or call.id|length != 9 %}
{{- raise_exception("Tool call IDs should be alphanumeric strings with length 9!") }}{%- endif %}
{{- ', "id": "' + call.id + '"}' }}{%- endfor %}{{- "]" + eos_token }}{%- elif message.role == "tool" %}
{%- if not message.tool_call_id is defined or message.tool_call_id|length != 9 %}
{{- raise_exception("Tool call IDs should be alphanumeric strings with length 9!") }}{%- endif %}
{{- "[TOOL_RESULTS] " + message.content + ' "call_id": "' + message.tool_call_id + '"[/TOOL_RESULTS]' }}
{%- else %}{{- " " + message.content + eos_token }}{%- endif %}{%- endfor %}"""


@pytest.mark.parametrize("call_id", ["call_8hPZJmTJwkYbVqKfGxOpLcDn", "call_1", "9Ae3bDc2F", None])
def test_ids_of_calls_have_nine_characters_where_the_template_takes_no_others(write, call_id):
    row = openai(CALL)
    for message, name in ((row["messages"][1]["tool_calls"][0], "id"), (row["messages"][2], "tool_call_id")):
        message[name] = call_id
    rows = read_examples(recipe(write("rows.jsonl", [row])).dataset).train
    tokenizer = build_tokenizer(MISTRAL)
    [sequences] = Encoder(tokenizer).encode(rows.examples)
    assert isinstance(sequences, list), sequences.reason
    text = tokenizer.decode(sequences[0].input_ids)
    [written] = set(re.findall(r'"(?:call_)?id": "([^"]*)"', text))
    assert re.fullmatch("[A-Za-z0-9]{9}", written) and (written == call_id or call_id != "9Ae3bDc2F")


@pytest.mark.parametrize("shape", SHAPES)
def test_every_shape_becomes_the_same_text_as_openais(write, shape):
    sequences, tokenizer = encoded(write, SHAPES[shape], "qwen2_5")
    expected, _ = encoded(write, openai(CALL), "qwen2_5")
    trained, wanted = (trained_text(sequence, tokenizer) for sequence in (sequences[0], expected[0]))
    assert wanted.startswith(trained)
    if shape != "xLAM":
        assert trained == wanted
        assert tokenizer.decode(sequences[0].input_ids) == tokenizer.decode(expected[0].input_ids)


def test_a_template_that_changes_arguments_is_refused(write):
    row = openai({"name": "get_weather", "arguments": {"at": [None]}})
    result, _ = encoded(write, row, "gemma4")
    assert "it parses back to other arguments" in result.reason
