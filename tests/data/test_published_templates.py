"""The chat templates of published models, as TRL ships them, with and without its generation markers."""

import re
from functools import cache
from pathlib import Path

import pytest
import trl
from small_data import build_tokenizer, talk, trained_text

from finetune.data.checks import BadRow
from finetune.data.formats import parse
from finetune.data.tokens import Encoder

FOLDER = Path(trl.__file__).parent / "chat_templates"
NAMES = sorted(path.stem for path in FOLDER.glob("*.jinja"))
#: Templates for images take text only as lists of parts, which is not what is trained here.
FOR_IMAGES = [name for name in NAMES if name.startswith(("llava_next", "idefics3", "smolvlm"))]
TOKEN = re.compile(
    r"<[|｜][^<>|｜\s]{2,40}[|｜]>|<(?:start|end)_of_turn>|<sop>|\[gMASK\]|<turn\|>|<\|turn>|<channel\|>|<\|channel>|<end_of_utterance>"
)
QUESTIONS, ANSWERS = ("What is 2+2?", "And 3+4, please?"), ("It is 4.", "Seven!")


@cache
def tokenizer_of_all():
    names = {token for name in NAMES for token in TOKEN.findall((FOLDER / f"{name}.jinja").read_text(encoding="utf-8"))}
    return build_tokenizer(extra=tuple(sorted(names)))


def sequences(name, *turns):
    tokenizer = tokenizer_of_all()
    tokenizer.chat_template = (FOLDER / f"{name}.jinja").read_text(encoding="utf-8")
    encoder = Encoder(tokenizer, with_template=True)
    [result] = encoder.encode([parse(talk(*turns), "messages", "rows.jsonl", 1)])
    return encoder, result


@pytest.mark.parametrize(
    "name", [name for name in NAMES if name not in FOR_IMAGES and "generation %}" not in (FOLDER / f"{name}.jinja").read_text()]
)
def test_each_answer_is_trained_after_the_very_text_that_asks_for_it(name):
    encoder, result = sequences(name, QUESTIONS[0], ANSWERS[0], QUESTIONS[1], ANSWERS[1])
    messages = talk(QUESTIONS[0], ANSWERS[0], QUESTIONS[1])["messages"]
    for length in (1, 3):
        prompt_ids = encoder.prompt_ids(messages[:length])
        matching = [sequence for sequence in result if len(prompt_ids) in _prefix_lengths(sequence, prompt_ids)]
        if not matching:  # the template asks with <think>, which it doesn't write; the report says so
            matching = [sequence for sequence in result if "unprompted" in sequence.notes]
            remainders = [
                encoder.tokenizer.decode(prompt_ids[length:])
                for sequence in matching
                for length in _prefix_lengths(sequence, prompt_ids)
            ]
            assert any(remainder and re.fullmatch(r"\s*(</?think>\s*)?", remainder) for remainder in remainders), remainders
        assert len(matching) == 1


def _prefix_lengths(sequence, prompt_ids) -> list[int]:
    """Lengths of the prefixes before answers of the sequence that equal the start of `prompt_ids`."""
    labels = sequence.labels
    answer_starts = [index for index in range(1, len(labels)) if labels[index - 1] == -100 != labels[index]]
    return [index for index in answer_starts if sequence.input_ids[:index].tolist() == prompt_ids[:index]]


@pytest.mark.parametrize(
    "name", [name.removesuffix("_training") for name in NAMES if name.endswith("_training") and name not in FOR_IMAGES]
)
def test_positions_equal_those_of_trls_markers_where_both_write_the_same_text(name):
    _, by_prefix = sequences(name, QUESTIONS[0], ANSWERS[0])
    encoder, by_markers = sequences(f"{name}_training", QUESTIONS[0], ANSWERS[0])
    decode = encoder.tokenizer.decode
    for sequence in (*by_prefix, *by_markers):
        assert ANSWERS[0] in trained_text(sequence, encoder.tokenizer)
    if decode(by_prefix[0].input_ids) == decode(by_markers[0].input_ids) and not by_prefix[0].notes:
        ours, trls = trained_text(by_prefix[0], encoder.tokenizer), trained_text(by_markers[0], encoder.tokenizer)
        assert trls.endswith(ours.lstrip()), (ours, trls)  # TRL's may begin with the header of the turn


@pytest.mark.parametrize("name", FOR_IMAGES)
def test_templates_for_images_are_refused_with_a_reason(name):
    _, result = sequences(name, QUESTIONS[0], ANSWERS[0])
    assert isinstance(result, BadRow)
    assert "chat template" in result.reason


def test_a_template_with_todays_date_gives_the_same_tokens_every_day():
    encoder, [sequence] = sequences("llama3_2", QUESTIONS[0], ANSWERS[0])
    assert "26 Jul 2024" in encoder.tokenizer.decode(sequence.input_ids)
    assert not encoder.template.writes_today
    encoder, _ = sequences("gptoss", QUESTIONS[0], ANSWERS[0])
    assert encoder.template.writes_today
