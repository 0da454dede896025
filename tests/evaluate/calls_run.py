"""A run of the bundled tiny model that has learnt a few calls of tools by heart."""

import json
from pathlib import Path

#: A template of the tiny model's tokens with tools and calls, in Qwen's and Hermes' form.
TEMPLATE = """{%- if tools %}<|system|>Tools: {% for tool in tools %}{{ tool.function.name }} {% endfor %}<|end|>{% endif %}
{%- for message in messages %}{%- if message.role == 'assistant' %}<|assistant|>{{ message.content }}
{%- for call in message.tool_calls or [] %}<tool_call>{"name": "{{ call.function.name }}", "arguments":
{{- ' ' + call.function.arguments | tojson }}}</tool_call>{% endfor %}<|end|>
{%- elif message.role == 'tool' %}<|user|><tool_response>{{ message.content }}</tool_response><|end|>
{%- else %}{{ '<|' + message.role + '|>' + message.content + '<|end|>' }}{%- endif %}
{%- endfor %}{%- if add_generation_prompt %}<|assistant|>{%- endif %}"""
PARAMETERS = {"type": "object", "properties": {"city": {"type": "string"}, "days": {"type": "integer"}}, "required": ["city"]}
TOOLS = [
    {"type": "function", "function": {"name": "weather", "description": "The weather.", "parameters": PARAMETERS}},
    {"type": "function", "function": {"name": "time", "description": "The time.", "parameters": PARAMETERS}},
]


def call(name, **arguments):
    return {"type": "function", "function": {"name": name, "arguments": arguments}}


def user(text):
    return {"role": "user", "content": text}


def assistant(text="", *calls):
    return {"role": "assistant", "content": text, **({"tool_calls": list(calls)} if calls else {})}


ONE = [user("Weather in Bern?"), assistant("", call("weather", city="Bern", days=2))]
TWO = [user("Weather and time in Oslo?"), assistant("Sure.", call("weather", city="Oslo"), call("time", city="Oslo"))]
REPLY = [*ONE, {"role": "tool", "content": "rain"}, assistant("It rains in Bern.")]
NO_CALL = [user("Good morning!"), assistant("Good morning to you.")]
BROKEN = [user("Break it."), assistant('<tool_call>{"name": "weather", ')]


def write_rows(path: Path, conversations):
    rows = [{"messages": messages, "tools": TOOLS} for messages in conversations]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")


def make(folder: Path, conversations=(ONE, TWO, REPLY, NO_CALL, BROKEN), *overrides: str) -> Path:
    """The directory of a run that was trained on these conversations until it gives their answers."""
    from finetune.recipe import load_recipe
    from finetune.run.prepare import create_run, prepare
    from finetune.run.worker import Worker

    data, template = folder / "rows.jsonl", folder / "calls.jinja"
    write_rows(data, conversations)
    template.write_text(TEMPLATE, encoding="utf-8")
    settings = (
        f"dataset.path={data}", f"chat_template={template}", f"output_dir={folder / 'calls'}", "load_in_4bit=false",
        "lora_r=32", "lora_alpha=64", "max_steps=60", "learning_rate=5e-3", "eval_steps=0", "dataset.test_split_size=0",
        "effective_batch_size=5", "per_device_train_batch_size=5", "max_length=512", *overrides,
    )  # fmt: skip
    run = create_run(prepare(load_recipe("tiny-cpu", settings)))
    assert Worker(run).main() == 0
    return run.path
