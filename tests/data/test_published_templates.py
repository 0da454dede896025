"""The chat templates of published models, as TRL ships them, with and without its generation markers."""

import re
from functools import cache
from pathlib import Path

import pytest
import trl
from small_data import build_tokenizer, talk, trained_text

from finetune.data import Encoder
from finetune.data.checks import BadRow
from finetune.data.formats import parse

FOLDER = Path(trl.__file__).parent / "chat_templates"
NAMES = sorted(path.stem for path in FOLDER.glob("*.jinja"))
#: Templates for images take text only as lists of parts, which is not what is trained here.
FOR_IMAGES = [name for name in NAMES if name.startswith(("llava_next", "idefics3", "smolvlm"))]
TOKEN = re.compile(
    r"<[|｜][^<>|｜\s]{2,40}[|｜]>|<(?:start|end)_of_turn>|<sop>|\[gMASK\]|<turn\|>|<\|turn>|<channel\|>|<\|channel>"
)
QUESTIONS, ANSWERS = ("What is 2+2?", "And 3+4, please?"), ("It is 4.", "Seven!")


@cache
def tokenizer_of_all():
    names = {token for name in NAMES for token in TOKEN.findall((FOLDER / f"{name}.jinja").read_text(encoding="utf-8"))}
    return build_tokenizer(extra=tuple(sorted(names)))


def sequences(name, *turns):
    tokenizer = tokenizer_of_all()
    tokenizer.chat_template = (FOLDER / f"{name}.jinja").read_text(encoding="utf-8")
    encoder = Encoder(tokenizer, conversations=True)
    [result] = encoder.encode([parse(talk(*turns), "messages", {}, "rows.jsonl", 1)])
    return encoder, result


@pytest.mark.parametrize("name", [name for name in NAMES if name not in FOR_IMAGES])
def test_every_answer_and_its_end_is_trained_once_and_no_question_is(name):
    encoder, result = sequences(name, QUESTIONS[0], ANSWERS[0], QUESTIONS[1], ANSWERS[1])
    stretches = [stretch for one in result for stretch in trained_text(one, encoder.tokenizer).split("|It is")]
    text = "".join(trained_text(one, encoder.tokenizer) for one in result)
    assert [text.count(answer) for answer in ANSWERS] == [1, 1], stretches
    assert not any(question in text for question in QUESTIONS)
    for one in result:
        trained = [place for place, label in enumerate(one.labels) if label != -100]
        ends = [place for place in trained if place + 1 not in set(trained)]
        assert all(int(one.input_ids[place]) in encoder.tokenizer.added_tokens_decoder for place in ends)
        assert encoder.stops & set(one.labels.tolist())


@pytest.mark.parametrize(
    "name", [name for name in NAMES if name not in FOR_IMAGES and "generation %}" not in (FOLDER / f"{name}.jinja").read_text()]
)
def test_each_answer_is_trained_after_the_very_text_that_asks_for_it(name):
    encoder, result = sequences(name, QUESTIONS[0], ANSWERS[0], QUESTIONS[1], ANSWERS[1])
    messages = talk(QUESTIONS[0], ANSWERS[0], QUESTIONS[1])["messages"]
    for length in (1, 3):
        asked = encoder.prompt_ids(messages[:length])
        hosts = [one for one in result if len(asked) in _read_before_answers(one, asked)]
        if not hosts:  # the template asks with <think>, which it doesn't write; the report says so
            hosts = [one for one in result if "unprompted" in one.notes]
            rests = [encoder.tokenizer.decode(asked[place:]) for one in hosts for place in _read_before_answers(one, asked)]
            assert any(rest and re.fullmatch(r"\s*(</?think>\s*)?", rest) for rest in rests), rests
        assert len(hosts) == 1


def _read_before_answers(one, asked) -> list[int]:
    """Lengths of what is read before an answer of the sequence, where `asked` begins with the same tokens."""
    starts = [place for place in range(1, len(one.labels)) if one.labels[place] != -100 and one.labels[place - 1] == -100]
    return [place for place in starts if one.input_ids[:place].tolist() == asked[:place]]


@pytest.mark.parametrize(
    "name", [name.removesuffix("_training") for name in NAMES if name.endswith("_training") and name not in FOR_IMAGES]
)
def test_positions_equal_those_of_trls_markers_where_both_write_the_same_text(name):
    _, plain = sequences(name, QUESTIONS[0], ANSWERS[0])
    encoder, marked = sequences(f"{name}_training", QUESTIONS[0], ANSWERS[0])
    decode = encoder.tokenizer.decode
    core = f"{ANSWERS[0]}"
    for one in (*plain, *marked):
        assert core in trained_text(one, encoder.tokenizer)
    if decode(plain[0].input_ids) == decode(marked[0].input_ids) and not plain[0].notes:
        ours, theirs = trained_text(plain[0], encoder.tokenizer), trained_text(marked[0], encoder.tokenizer)
        assert theirs.endswith(ours.lstrip()), (ours, theirs)  # TRL's may begin with the header of the turn


@pytest.mark.parametrize("name", FOR_IMAGES)
def test_templates_for_images_are_refused_with_a_reason(name):
    _, result = sequences(name, QUESTIONS[0], ANSWERS[0])
    assert isinstance(result, BadRow)
    assert "chat template" in result.reason


def test_a_template_with_todays_date_gives_the_same_tokens_every_day():
    encoder, [one] = sequences("llama3_2", QUESTIONS[0], ANSWERS[0])
    assert "26 Jul 2024" in encoder.tokenizer.decode(one.input_ids)
    assert not encoder.template.writes_today
    encoder, _ = sequences("gptoss", QUESTIONS[0], ANSWERS[0])
    assert encoder.template.writes_today
