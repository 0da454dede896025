"""However an answer is cut into pieces, its text comes once and its calls never as text."""

import random
import sys
from pathlib import Path

import pytest

sys.path.append(str(Path(__file__).parents[1] / "data"))
from test_calls_in_answers import reader_of  # noqa: E402

from finetune.evaluate.call_stream import CallStream  # noqa: E402

CALL = '<tool_call>\n{"name": "f", "arguments": {"a": "<b>"}}\n</tool_call>'
TEXTS = {
    "qwen2_5": [
        "Plain, 1 < 2 <tool.",
        f"Let me see.\n{CALL}\n{CALL}<|im_end|>",
        CALL,
        "<tool_call>{broken",
        f"{CALL} And more.",
        "",
    ],
    "llama3_1": ['{"name": "f", "parameters": {}}<|eot_id|>', 'A set is {"a"}.', '{"city": "Bern"}', "Hi<|eot_id|>"],
    "lfm2_v2": ["Yes.<|tool_call_start|>[f(a='x'), g()]<|tool_call_end|><|im_end|>", "No <|tool_call_start|>[f("],
}


@pytest.mark.parametrize(("name", "text"), [(name, text) for name, texts in TEXTS.items() for text in texts])
def test_the_text_and_the_calls_are_those_of_the_whole_answer(name, text):
    _, reader = reader_of(name)
    source, whole = random.Random(0), reader.read(text)
    for _ in range(20):
        cuts = sorted(source.sample(range(len(text) + 1), min(len(text), source.randint(0, 12))))
        pieces, emitted = [text[a:b] for a, b in zip([0, *cuts], [*cuts, len(text)], strict=True)], []
        if any(token in text and not any(token in piece for piece in pieces) for token in ("<|im_end|>", "<|eot_id|>")):
            continue  # a special token is one piece
        stream = CallStream(reader, (), emitted.append)
        for piece in pieces:
            stream.add(piece)
        assert stream.finish() == whole
        assert "".join(emitted).split() == whole.text.split() and (not whole.calls or "<tool_call>" not in "".join(emitted))
