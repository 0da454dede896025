"""Files in the shapes of other tools: each is trained on as it is meant, or refused by the name of what it is."""

import pytest
from small_data import advised, build_tokenizer, prepare, read_examples, recipe, talk, trained_text

from finetune.data.tokens import Encoder
from finetune.errors import DataError

U, A = {"role": "user", "content": "Is <image> a tag?"}, {"role": "assistant", "content": "Yes."}
ASK = [{"from": "human", "value": "Hi"}]
GPT = {"from": "gpt", "value": "Hello"}
DPO = "preference data .*DPO"


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ({"conversations": ASK, "chosen": GPT, "rejected": {"from": "gpt", "value": "Go."}}, DPO),
        ({"chosen": [U, A], "rejected": [U, A], "score_chosen": 4.0}, DPO),
        ({"question": "Hi", "response_j": "Hello", "response_k": "Go."}, DPO),
        ({"messages": [U, A], "label": False}, "'label' isn't used, and it says whether an answer is good .for KTO"),
        ({"instruction": "Hi", "output": "Go.", "kto_tag": False}, "'kto_tag' isn't used"),
        ({"text": "A film that drags.", "label": 0}, "'label' isn't used"),
        ({"messages": [U, A], "image_url": ["a.jpg"]}, "'image_url' isn't used, and it says pictures"),
        ({"messages": [{**U, "images": ["a.jpg"]}, A]}, "'images' isn't used"),
        ({"instruction": "Hi", "output": "Hello", "tools": '[{"name": "greet"}]'}, "'tools' isn't used"),
        ({"prompt": "2+2?", "completion": "4", "cot": "two and two"}, "'cot' isn't used, and it says the reasoning"),
        ({"question": "2+2?", "answer": "4", "reasoning": "off"}, "'reasoning' has no texts"),
        ({"question": "Who?", "answer": "Me", "context": "I did."}, "'context' isn't used, and it says a part of the prompt"),
        ({"prompt": "Hi", "completion": "Hello", "system": "Be brief."}, "'system' isn't used"),
        ({"messages": [U, A], "score": 1.5}, "'score' isn't used, and it says how good"),
        ({"messages": [U, A], "weight": 0.5}, "'weight' isn't used, and it says how much"),
        ({"messages": [U, {**A, "mask": 1}]}, "'mask' isn't used"),
        ({"question_id": 81, "category": "writing", "turns": ["Write.", "Again."]}, "MT-Bench"),
        ({"id": "seed_task_0", "instruction": "Name it", "instances": [{"input": "", "output": "Tea"}]}, "self-instruct"),
    ],
)
def test_what_would_be_learnt_in_a_wrong_sense_stops_the_run_and_is_named(write, row, message):
    with pytest.raises(DataError, match=message) as error:
        read_examples(recipe(write("rows.jsonl", [row, row]), on_bad_rows="skip").dataset)
    assert "dataset" in error.value.fix or "jq" in error.value.fix


@pytest.mark.parametrize(
    "row",
    [
        {"messages": [U, A], "id": 1, "source": "web", "lang": "en"},
        {"messages": [{**U, "weight": 1}, {**A, "train": True}], "images": [], "tools": "[]", "weight": 1, "label": None},
        {"conversations": [*ASK, {**GPT, "loss": True}], "system": "", "chosen": None},
        {"instruction": "Hi", "input": "", "output": "Hello", "text": "Hi Hello", "system": None},
        {"text": "A page of the web.", "url": "x", "score": 0.7, "language_score": 0.9},
        {"prompt": "2+2=", "completion": "4", "idx": 3},
        {"question": "2+2?", "answer": "4", "difficulty": 2},
    ],
)
def test_clean_rows_are_never_stopped(write, row):
    rows = read_examples(recipe(write("rows.jsonl", [row])).dataset).train
    assert (len(rows.examples), rows.refused) == (1, [])


def test_what_is_left_out_on_purpose_does_not_stop_the_run(write):
    path = write("rows.jsonl", [{**talk("Hi", "Hello"), "label": True, "score": 3}])
    with pytest.raises(DataError, match="'label'.*1 row.*") as error:
        read_examples(recipe(path).dataset)
    assert {"ignore_columns": ["label", "score"]} in advised(error.value.fix)
    assert len(read_examples(recipe(path, ignore_columns=["label", "score"]).dataset).train.examples) == 1


def test_rows_that_point_at_an_image_that_is_left_out_are_refused(write):
    path = write("rows.jsonl", [{"messages": [U, A], "images": ["a.jpg"]}, {"messages": [U, A], "images": []}])
    [row] = read_examples(recipe(path, ignore_columns=["images"]).dataset).train.refused
    assert (row.row, row.reason) == (1, "has <image> in its text, in the place of what is left out")


@pytest.mark.parametrize("name", ["reasoning_content", "reasoning", "thinking"])
def test_reasoning_reaches_the_template_or_the_row_is_refused(write, name):
    template = (
        "{% for m in messages %}{{ '<|im_start|>' + m.role + '\n' }}{% if m.reasoning_content %}"
        "{{ '<think>' + m.reasoning_content + '</think>' }}{% endif %}{{ m.content + '<|im_end|>\n' }}{% endfor %}"
        "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
    )
    row = talk("2+2?", "4")
    row["messages"][1][name] = "two and two"
    path = write("rows.jsonl", [row])
    [example] = read_examples(recipe(path).dataset).train.examples
    [[sequence]] = Encoder(build_tokenizer(template)).encode([example])
    assert trained_text(sequence, build_tokenizer(template)) == "<think>two and two</think>4<|im_end|>"
    with pytest.raises(DataError, match="leaves out the reasoning"):
        prepare(recipe(path), build_tokenizer(), max_length=None)
    assert prepare(recipe(path, ignore_columns=[name]), build_tokenizer(), max_length=None).report.rows_used == 1


@pytest.mark.parametrize(
    ("row", "columns"),
    [
        ({"question": "2+2?", "thought": "two and two", "answer": "4"}, {}),
        ({"Frage": "2+2?", "Weg": "two and two", "x": "4"}, {"instruction": "Frage", "output": "x", "reasoning": "Weg"}),
        ({"messages": [U, {"role": "assistant", "content": "4", "thinking": "two and two"}]}, {}),
    ],
)
def test_reasoning_that_the_template_leaves_out_is_left_out_as_its_refusal_says(write, row, columns):
    path = write("rows.jsonl", [row])
    with pytest.raises(DataError, match=r"dataset.ignore_columns=\[reasoning_content\]"):
        prepare(recipe(path, columns=columns), build_tokenizer(), max_length=None)
    if columns:
        with pytest.raises(DataError, match="prompt_completion, which has no field reasoning"):
            read_examples(recipe(path, columns={"prompt": "Frage", "completion": "x", "reasoning": "Weg"}).dataset)
    ignoring = recipe(path, columns=columns, ignore_columns=["reasoning_content"])
    [example] = prepare(ignoring, build_tokenizer(), max_length=None).examples
    assert example.messages[-1] == {"role": "assistant", "content": "4"}
