"""However an answer is cut into pieces, its thought and its text come once and apart, and its calls never as text."""

import random
import sys
from pathlib import Path

import pytest

sys.path.append(str(Path(__file__).parents[1] / "data"))
from small_data import build_tokenizer  # noqa: E402
from test_calls_in_answers import reader_of  # noqa: E402
from test_round_trip import encoded  # noqa: E402

from finetune.evaluate.answerer import AnswerStream, answer_limit  # noqa: E402
from finetune.evaluate.results import Journal, digest  # noqa: E402
from finetune.evaluate.rows import EvalRows  # noqa: E402
from finetune.evaluate.score import ModelOutputs  # noqa: E402
from finetune.evaluate.scorers import scorer  # noqa: E402

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
    "qwen3": [
        "<think>\n\n</think>\n\nPlain.<|im_end|>",
        "<think>\nTwo and\ntwo.\n</think>\n\nFour, </think> too.<|im_end|>",
        f"<think>\nI could {CALL}.\n</think>\n\n{CALL}<|im_end|>",
        "<think>\nStill thinking",
    ],
    "qwen3_6": ["Two and two.\n</think>\n\nFour.<|im_end|>", "\n</think>\n\nFour.<|im_end|>"],
    "gptoss": [
        "<|channel|>final<|message|>Four.<|return|>",
        "<|channel|>analysis<|message|>Two.<|end|><|start|>assistant<|channel|>final<|message|>Four.<|return|>",
    ],
    "muse_glimmer": [" to=self<|message|>Two.<|eom|><|start|>assistant to=user<|message|>Four.<|eot|>"],
    "deepseek_r1_distill": ["Two and two.</think>\n\nFour.<｜end▁of▁sentence｜>"],
    "lfm2_v2": ["Yes.<|tool_call_start|>[f(a='x'), g()]<|tool_call_end|><|im_end|>", "No <|tool_call_start|>[f("],
}


@pytest.mark.parametrize(("name", "text"), [(name, text) for name, texts in TEXTS.items() for text in texts])
def test_the_text_and_the_calls_are_those_of_the_whole_answer(name, text):
    _, reader = reader_of(name)
    is_cut = text.endswith("Still thinking")
    source, whole = random.Random(0), reader.read(text, is_cut=is_cut)
    for count in [*range(13), len(text)]:
        cuts = sorted(source.sample(range(len(text) + 1), min(len(text), count)))
        pieces, emitted = [text[a:b] for a, b in zip([0, *cuts], [*cuts, len(text)], strict=True)], {True: "", False: ""}

        def say(piece, is_thought, emitted=emitted):
            emitted[is_thought] += piece

        if any(token in text and not any(token in piece for piece in pieces) for token in ("<|im_end|>", "<|eot_id|>")):
            continue  # a special token is one piece
        stream = AnswerStream(reader, (), say)
        for piece in pieces:
            stream.add(piece)
        assert stream.finish(is_cut=is_cut) == whole
        assert emitted[False].split() == whole.text.split() and (not whole.calls or "<tool_call>" not in emitted[False])
        assert emitted[True] == whole.thought


def score_of(folder, template, name, answers, references, **more):
    """Score answers that an earlier evaluation has written; an answer is cut if it ends without a mark."""
    journal, rows = Journal(folder, "tuned", {}), [[row] for row in range(len(answers))]
    for ids, text in zip(rows, answers, strict=True):
        is_cut = not text.endswith(("|>", "}"))
        journal.add({digest([ids, 9, "with special tokens"]): {"answer": text, "is_cut": is_cut}})
    eval_rows = EvalRows(["Where?"] * len(rows), rows, references, **more)
    outputs = ModelOutputs(lambda: None, journal, eval_rows, "tuned", 9, lambda _: None, reader_of(template)[1])
    return outputs.score(scorer(name))


def test_scores_see_the_answer_without_its_thought_and_cut_answers_are_counted(tmp_path):
    answers = {
        "<think>\n\n</think>\n\nIn Bern.<|im_end|>": ("In Bern.", ""),
        "<think>\nIn Rome?\n</think>\n\nIn Bern.<|im_end|>": ("In Bern.", "In Rome?"),
        "<think>\nIn Bern. But": ("", "In Bern. But"),  # the limit is inside the thought
        "In Basel.<|im_end|>": ("In Basel.", ""),
    }
    score = score_of(tmp_path, "qwen3", "contains", [*answers], ["In Bern."] * len(answers))
    assert list(zip(score.answers, score.thoughts, strict=True)) == [*answers.values()]
    assert (score.exact, score.scores, score.cut) == ([True, True, False, False], [1, 1, 0, 0], 1)


def test_without_tools_a_call_is_wrong_and_json_in_the_form_of_a_call_is_right_where_it_was_taught(tmp_path):
    text, call = '{"name": "four", "parameters": {}}', '{"name": "f", "parameters": {}}'
    score = score_of(tmp_path, "llama3_1", "calls", [text, call], [text, "It is 4."], calls=[[], []], tools=[[], []])
    assert (score.exact, score.scores) == ([True, False], [1, 0])


def test_text_around_an_answer_is_not_streamed_and_a_base_model_that_must_think_gets_room_for_it():
    emitted, reader = [], encoded("text around", "plain")[0].chat_format
    stream = AnswerStream(reader, None, lambda piece, _: emitted.append(piece))
    for piece in ("<answer>", "4", "</answer>", " ", "<|end|>"):
        stream.add(piece)
    assert (stream.finish().text, "".join(emitted)) == ("4", "4")
    formats = [reader_of(name)[1] for name in ("qwen3_6", "deepseek_r1_distill")]
    limits = [answer_limit(build_tokenizer(), ["In Bern."], 40, chat_format) for chat_format in formats]
    assert limits == [40 + 16, 40 + 16 + 1024]
    assert (formats[0].before_answer.strip(), formats[1].before_answer) == ("</think>", "")
