"""Calls in a model's answer: every template's own form parses back to the same calls; what can't be read stays text."""

import random
from functools import cache

import pytest
from small_data import build_tokenizer
from test_published_templates import FOLDER, NAMES, tokenizer_of_all

from finetune.data.chat_format import common_prefix_length
from finetune.data.checks import BadRow
from finetune.data.template import Template

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
#: Templates that write calls; those that TRL ships twice, with markers for training, write them the same.
FAMILIES = ("deepseekv3", "diffusion", "gemma4", "glm", "gptoss", "lfm2_", "llama3_", "muse", "nemotron", "qwen3", "qwen2_5")
WITH_CALLS = [name for name in NAMES if name.startswith(FAMILIES) and not name.endswith(("_training", "qwen2_5_vl"))] + [
    "mistral"
]
HOSTILE = [
    'say "hi"', "it's", "a\nb\n\nc", "{", "}}", '{"name": "x", "arguments": {}}', "[1, 2]", "true", "3", "null", "None",
    "naïve 漢字 🎉", "</tool_call", "</parameter>", "\\", '\\"', "\t", "a, b=c", "x" * 100_000, "<tool_call>", "key: value",
    "```json", ", ", "=",
]  # fmt: skip
#: Templates that write a text between quotes as it is; a row with a quote or a line's end in it is refused in training.
GEMMA_MARKS = ("<|tool_call>", "<tool_call|>", "<|tool_response>", '<|"|>')
RAW_STRINGS = ("lfm2_2_5", "lfm2_2_5_v2")
QUESTION = [{"role": "user", "content": "A question?"}]


@cache
def tokenizer_with_marks():
    tokenizer = tokenizer_of_all()
    return build_tokenizer(extra=(*GEMMA_MARKS, *(token.content for token in tokenizer.added_tokens_decoder.values())))


def reader_of(name):
    tokenizer = build_tokenizer(MISTRAL) if name == "mistral" else tokenizer_with_marks()
    if name != "mistral":
        tokenizer.chat_template = (FOLDER / f"{name}.jinja").read_text(encoding="utf-8")
    template = Template(tokenizer)
    return template, template.format


def random_value(source, depth=0):
    kinds = [
        lambda: source.choice(HOSTILE[:-5]) if source.random() < 0.3 else "".join(source.choices("abc XYZ", k=8)),
        lambda: source.randint(-(10**6), 10**6),
        lambda: source.random() * 1000,
        lambda: source.random() < 0.5,
        lambda: [random_value(source, depth + 1) for _ in range(source.randint(1, 3))],
        lambda: {f"key_{n}": random_value(source, depth + 1) for n in range(source.randint(1, 3))},
    ]
    return source.choice(kinds[: 4 if depth > 1 else 6])()


TYPES = {bool: "boolean", str: "string", int: "integer", float: "number", list: "array", dict: "object", type(None): "null"}


def is_read_back(template, reader, arguments):
    """Whether the arguments of a call, rendered and read, are the same; training refuses a row that the template changes."""
    tool = {
        "name": "get_weather",
        "parameters": {"type": "object", "properties": {k: {"type": TYPES[type(v)]} for k, v in arguments.items()}},
    }
    call = {"type": "function", "function": {"name": "get_weather", "arguments": arguments}}
    prompt = template.render(QUESTION, add_generation_prompt=True)
    try:
        whole = template.render([*QUESTION, {"role": "assistant", "content": "", "tool_calls": [call]}])
    except BadRow:
        return False
    answer = reader.read(whole[common_prefix_length(prompt, whole) :], [{"type": "function", "function": tool}])
    return [call["function"]["arguments"] for call in answer.calls] == [arguments]


@pytest.mark.slow
@pytest.mark.parametrize("name", WITH_CALLS)
def test_random_and_hostile_arguments_are_read_back_or_refused_in_training(name):
    source, (template, reader) = random.Random(name), reader_of(name)
    arguments = [{f"argument_{n}": random_value(source) for n in range(source.randint(0, 4))} for _ in range(20)]
    changed = sum(not is_read_back(template, reader, values) for values in arguments)
    assert changed <= (4 if name in RAW_STRINGS else 0)
    hostile = [text for text in HOSTILE if not is_read_back(template, reader, {"text": text, "other": 3})]
    assert bool(hostile) == (name in RAW_STRINGS), hostile


@pytest.mark.parametrize("name", ["qwen2_5", "qwen3_8", "gemma4_v5", "deepseekv3", "lfm2_v2", "glm4moe"])
def test_parallel_calls_keep_their_order_and_the_text_before_them(name):
    template, reader = reader_of(name)
    calls = [{"type": "function", "function": {"name": f"tool_{n}", "arguments": {"n": n}}} for n in (2, 1, 2)]
    prompt = template.render(QUESTION, add_generation_prompt=True)
    whole = template.render([*QUESTION, {"role": "assistant", "content": "Let me see.", "tool_calls": calls}])
    answer = reader.read(whole[common_prefix_length(prompt, whole) :])
    assert (answer.text, answer.calls, answer.is_unreadable) == ("Let me see.", calls, False)


@pytest.mark.parametrize(
    ("name", "text", "is_unreadable"),
    [
        ("qwen2_5", '<tool_call>\n{"name": "f", "arguments": {"a": }}\n</tool_call>', True),
        ("qwen2_5", '<tool_call>\n{"name": "f", "arguments": {}}', True),
        ("qwen2_5", '<tool_call>\n{"arguments": {}}\n</tool_call>', True),
        ("qwen2_5", '<tool_call>\n{"name": "f", "arguments": [1]}\n</tool_call>', True),
        ("qwen2_5", '<tool_call>\n{"name": "f", "arguments": ' + "[" * 5000, True),
        ("qwen2_5", '{"name": "f", "arguments": {}}', False),
        ("qwen3_8", "<tool_call>\n<function=f>\n<parameter=a>\n1\n</function>", True),
        ("qwen3_8", "I would call a <function>.", False),
        ("llama3_1", '{"city": "Bern"}', False),
        ("llama3_1", '{"name": "f", "parameters": {"a": 1}', True),
        ("llama3_1", '{"name": "f", "parameters": {}}; {"a": 1}', True),
        ("lfm2_v2", "<|tool_call_start|>[f(x, 1)]<|tool_call_end|>", True),
        ("gemma4_v5", '<|tool_call>call:f{a:<|"|>x}<tool_call|>', True),
    ],
)
def test_what_can_not_be_read_stays_text(name, text, is_unreadable):
    _, reader = reader_of(name)
    answer = reader.read(text, [{"function": {"name": "f"}}])
    assert (answer.calls, answer.is_unreadable) == ([], is_unreadable)
    assert answer.text == reader.without_special_tokens(text)


def test_a_call_that_is_only_thought_of_is_no_call():
    call = '<tool_call>\n{"name": "f", "arguments": {}}\n</tool_call>'
    _, reader = reader_of("qwen3")
    assert reader.read(f"<think>\nI could {call}.\n</think>\n\nNo.").calls == []
    assert len(reader.read(f"<think>\nI could {call}.\n</think>\n\n{call}").calls) == 1


@pytest.mark.parametrize(
    ("schema", "text", "value"),
    [
        ({"type": "string"}, "3", "3"), ({"type": "integer"}, "3", 3), ({"type": "boolean"}, "True", True), ({}, "[1]", [1]),
        ({"type": ["string", "null"]}, "null", None), ({"type": ["string", "null"]}, "3", "3"), ({"enum": [1, 2]}, "2", 2),
        ({"enum": ["1", "2"]}, "2", "2"), ({"anyOf": [{"type": "number"}, {"type": "null"}]}, "2.5", 2.5), ({}, "Bern", "Bern"),
    ],
)  # fmt: skip
def test_an_argument_in_tags_has_the_type_that_the_tool_says(schema, text, value):
    _, reader = reader_of("qwen3_8")
    tool = {"type": "function", "function": {"name": "f", "parameters": {"type": "object", "properties": {"a": schema}}}}
    written = f"<tool_call>\n<function=f>\n<parameter=a>\n{text}\n</parameter>\n</function>\n</tool_call>"
    [call] = reader.read(written, [tool]).calls
    assert call["function"]["arguments"] == {"a": value} and type(call["function"]["arguments"]["a"]) is type(value)


@pytest.mark.parametrize("name", ["idefics3", "smolvlm"])
def test_a_template_that_takes_lists_of_parts_ends_its_answers_and_opens_none(name):
    template, read = reader_of(name)
    assert template.tokenizer.convert_tokens_to_ids("<end_of_utterance>") in read.stops and not read.before_answer
