"""The trained text of an answer, read as evaluation reads an answer, is the row's thought, text and calls.

Every chat template that TRL ships, times shapes of rows. A row that does not come back is refused or noted.
"""

import functools
import itertools

import pytest
from test_calls_in_answers import tokenizer_with_marks
from test_published_templates import FOLDER, FOR_IMAGES, NAMES

from finetune.data.chat_format import thought_and_text
from finetune.data.checks import BadRow
from finetune.data.formats import parse
from finetune.data.tokens import NOT_TRAINED, Encoder

TEMPLATES = [name for name in NAMES if not name.endswith("_training") and name not in FOR_IMAGES]
PLACE = {"type": "object", "properties": {"place": {"type": "string"}}}
TOOLS = [
    {"type": "function", "function": {"name": name, "description": "d", "parameters": PLACE}}
    for name in ("weather_of", "time_of")
]


def user(text):
    return {"role": "user", "content": text}


def answer(text, **more):
    return {"role": "assistant", "content": text, **more}


def call(name):
    return {"type": "function", "id": "abcdefgh1", "function": {"name": name, "arguments": {"place": "Bern"}}}


def thinking(thought, text):
    return answer(f"<think>\n{thought}\n</think>\n\n{text}")


THOUGHT, SECOND = "Two and two are four.", "Three and four are seven."
ASKED, AGAIN, WEATHER = user("What is 2+2?"), user("And 3+4?"), user("Weather in Bern?")
FOUR, SEVEN, BERN = "It is 4.", "Seven!", call("weather_of")
REPLY = {"role": "tool", "name": "weather_of", "tool_call_id": "abcdefgh1", "content": "dry"}
SHAPES = {
    "plain": [ASKED, answer(FOUR)],
    "two turns": [ASKED, answer(FOUR), AGAIN, answer(SEVEN)],
    "system": [{"role": "system", "content": "Be brief."}, ASKED, answer(FOUR)],
    "<think>": [ASKED, thinking(THOUGHT, FOUR)],
    "reasoning": [ASKED, answer(FOUR, reasoning_content=THOUGHT)],
    "<think> 2 turns": [ASKED, thinking(THOUGHT, FOUR), AGAIN, thinking(SECOND, SEVEN)],
    "reasoning 2 turns": [ASKED, answer(FOUR, reasoning_content=THOUGHT), AGAIN, answer(SEVEN, reasoning_content=SECOND)],
    "spaces": [user("Fill in."), answer("    return 1\n")],
    "greeting": [answer("Hello, I am Ada."), ASKED, answer(FOUR)],
    "call": [WEATHER, answer("", tool_calls=[BERN])],
    "two calls": [WEATHER, answer("", tool_calls=[BERN, call("time_of")])],
    "call, reply": [WEATHER, answer("", tool_calls=[BERN]), REPLY, answer("It is dry.")],
    "thought, call": [WEATHER, answer("", reasoning_content=THOUGHT, tool_calls=[BERN])],
    "text, call": [WEATHER, answer("Let me see.", tool_calls=[BERN])],
    "one thought": [ASKED, answer(FOUR), AGAIN, answer(SEVEN, reasoning_content=SECOND)],
    "JSON": [ASKED, answer('{"name": "four", "parameters": {"value": 4}}')],
    "reasoning 2 turns, the last one trained": [
        ASKED, answer(FOUR, reasoning_content=THOUGHT, weight=0), AGAIN, answer(SEVEN, reasoning_content=SECOND),
    ],
    "tags": [ASKED, answer("Close the block with </think> and </b>.")],
}  # fmt: skip
TURN = "<|start|>{{ m.role }}<|message|>{{ m.content }}<|end|>{% endif %}{% endfor %}"
HEAD = "<|start|>assistant<|message|>"
#: Forms of thoughts that no template of TRL's has: the assistant's turn, and the end of the generation prompt.
FORMS = {
    "other marks": (
        HEAD + "{% if m.reasoning_content %}[THINK]{{ m.reasoning_content }}[/THINK]{% endif %}{{ m.content }}<|end|>",
        "<|message|>",
    ),
    "channels": (
        "{% if m.thinking %}<|start|>assistant<|channel|>inner<|message|>{{ m.thinking }}<|end|>{% endif %}"
        "<|start|>assistant<|channel|>outer<|message|>{{ m.content }}<|return|>", "",
    ),
    "taken from the text": (
        HEAD + "{% set parts = m.content.split('</think>') %}{% if parts | length > 1 %}<|channel|>"
        "{{ parts[0].replace('<think>', '').strip() }}<|return|>{% endif %}{{ parts[-1].lstrip() }}<|end|>", "<|message|>",
    ),
    "a channel and no thoughts": ("<|start|>assistant<|channel|>outer<|message|>{{ m.content }}<|return|>", ""),
    "a new line": ("<|start|>assistant\n{{ m.content }}<|end|>", ""),
    "prompted": (
        HEAD + "<my:think>{{ m.reasoning_content or '' }}</my:think>{{ m.content }}<|end|>", "<|message|><my:think>",
    ),
    "prompted brackets": (
        HEAD + "[THINK]{{ m.reasoning_content or '' }}[/THINK]{{ m.content }}<|end|>", "<|message|>[THINK]",
    ),
    "words": (
        HEAD + "{% if m.reasoning %}Thought: {{ m.reasoning }}\n{% endif %}Answer: {{ m.content }}<|end|>", "<|message|>",
    ),
    "a channel of answers": (
        "<|start|>assistant{% if m.thinking %}<|channel|>inner<|message|>{{ m.thinking }}{% endif %}"
        "<|channel|>outer<|message|>{{ m.content }}<|end|>", "",
    ),
    "text around": (HEAD + "<answer>{{ m.content }}</answer> <|end|>", "<|message|>"),
    "one end": (
        "{% if m.thinking %}<|start|>assistant<|channel|>inner<|message|>{{ m.thinking }}<|end|>{% endif %}"
        "<|start|>assistant<|channel|>outer<|message|>{{ m.content }}<|end|>", "",
    ),
    "a rule first": ("{% if messages[0].role != 'system' %}{{ raise_exception('no rule') }}{% endif %}" + HEAD
        + "{{ m.content }}<|end|>", "<|message|>",
    ),
}  # fmt: skip
CUSTOM = {
    name: "{% for m in messages %}{% if m.role == 'assistant' %}"
    + f"{turn}{{% else %}}{TURN}{{% if add_generation_prompt %}}<|start|>assistant{end}{{% endif %}}"
    for name, (turn, end) in FORMS.items()
}
#: The fewest cells that come back, of the first twelve shapes.
LEAST, FIRST_SHAPES = 344, [*SHAPES][:12]


def trained_runs(sequences):
    """Ids of each run of trained tokens."""
    for sequence in sequences:
        tokens = zip(sequence.input_ids.tolist(), sequence.labels.tolist(), strict=True)
        for is_trained, run in itertools.groupby(tokens, lambda token: token[1] != NOT_TRAINED):
            if is_trained:
                yield [token_id for token_id, _ in run]


def parts(thought, text, calls):
    """Some templates write the text before a call as a thought."""
    calls = [(call["function"]["name"], call["function"]["arguments"]) for call in calls]
    return ("", (thought + text).strip(), calls) if calls else (thought, text.strip(), calls)


def encoded(name, shape, **options):
    tokenizer = tokenizer_with_marks()
    tokenizer.chat_template = CUSTOM.get(name) or (FOLDER / f"{name}.jinja").read_text(encoding="utf-8")
    has_calls = any("tool_calls" in message for message in SHAPES[shape])
    encoder = Encoder(tokenizer, with_template=True, **options)
    row = {"messages": SHAPES[shape], **({"tools": TOOLS} if has_calls else {})}
    [result] = encoder.encode([parse(row, "messages", "rows.jsonl", 1)])
    return encoder, has_calls, result


@functools.cache
def cell(name, shape):
    """`comes back`, `noted: ...`, `refused: ...`, or `wrong: ...`."""
    messages = SHAPES[shape]
    encoder, has_calls, result = encoded(name, shape)
    if isinstance(result, BadRow):
        return f"refused: {result.reason}"
    chat_format, problems, read = encoder.chat_format, [], []
    stops = encoder.stops | chat_format.call_stops
    questions = [message["content"] for message in messages if message["role"] == "user"]
    for run in trained_runs(result):
        end = next((index for index, token_id in enumerate(run) if token_id in stops and index), len(run) - 1)
        problems += [] if run[end] in stops | chat_format.ends else ["no end"]
        text = encoder.tokenizer.decode(run[:end])
        problems += [f"{asked} is trained" for asked in questions if asked in text]
        read.append(chat_format.read(text, TOOLS if has_calls else None))
    taught = sorted(parts(its.thought, its.text, its.calls) for its in read)
    answers = [message for message in messages if message["role"] == "assistant" and message.get("weight") != 0]
    wanted = sorted(parts(*thought_and_text(message), message.get("tool_calls", ())) for message in answers)
    if taught != wanted:
        problems.append(f"{taught} are not {wanted}")
    exact = {thought_and_text(message)[1] for message in answers}
    notes = {note for sequence in result for note in sequence.notes}
    if {its.text for its in read} != exact and "trimmed" not in notes and not has_calls:
        problems.append("trimmed without a note")
    if problems:
        return f"wrong: {', '.join(problems)}"
    return "noted: trimmed" if "trimmed" in notes else "comes back"


@pytest.mark.parametrize("name", [*TEMPLATES, *CUSTOM])
def test_what_is_taught_is_read_back_or_refused_or_noted(name):
    cells = {shape: cell(name, shape) for shape in SHAPES}
    assert {shape: verdict for shape, verdict in cells.items() if verdict.startswith("wrong")} == {}
    sure = ["plain", "two turns"] if name != "a rule first" else []
    sure += ["system"] if name != "gemma" else []
    if name in CUSTOM and name not in ("one end", "a rule first"):
        sure += ["<think>", "<think> 2 turns", "JSON"]
        sure += ["reasoning", "one thought"] if "m.thinking" in (form := CUSTOM[name]) or "m.reasoning" in form else []
    assert {shape: cells[shape] for shape in sure} == dict.fromkeys(sure, "comes back")


def test_a_turn_may_end_with_an_added_token_that_is_not_special():
    tokenizer = tokenizer_with_marks()
    tokenizer.add_tokens(["<|fin|>"])
    tokenizer.chat_template = "{% for m in messages %}<|start|>{{ m.role }}\n{{ m.content }}<|fin|>\n{% endfor %}"
    encoder = Encoder(tokenizer, with_template=True)
    assert encoder.use_template().format.stops == {tokenizer.eos_token_id, tokenizer.convert_tokens_to_ids("<|fin|>")}


def test_what_is_not_learnt_as_written_is_refused_or_noted():
    whole = functools.partial(encoded, train_on_inputs=True)
    assert "trimmed" in whole("llama3_2", "spaces")[2][0].notes
    assert isinstance(whole("one end", "reasoning")[2], BadRow)
    assert cell("one end", "reasoning").startswith("refused: is read back")
    assert "altered" in encoded("gptoss", "text, call")[2][0].notes
    assert "altered" in encoded("qwen3", "reasoning 2 turns, the last one trained")[2][0].notes
    for name, shape, note, is_noted in (
        ("qwen3", "plain", "unthinking", True), ("qwen3", "one thought", "unthinking", False),
        ("llama3_2", "plain", "unthinking", False), ("glm4moe", "plain", "ended", True), ("qwen3", "plain", "ended", False),
    ):  # fmt: skip
        assert any(note in sequence.notes for sequence in encoded(name, shape)[2]) == is_noted, (name, shape, note)


@pytest.mark.parametrize("name", [name for name in NAMES if name.endswith("_training") and name not in FOR_IMAGES])
def test_answers_between_trls_own_markers_are_taught_with_their_ends(name):
    assert cell(name, "two turns") in ("comes back", "noted: trimmed")


def test_most_rows_come_back():
    cells = [cell(name, shape) for name in TEMPLATES for shape in FIRST_SHAPES]
    assert (len(cells), cells.count("comes back") >= LEAST) == (456, True)
