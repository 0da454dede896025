"""Files in the shapes of other tools: each is trained on as it is meant, or refused by the name of what it is."""

import pytest
from small_data import advised, build_tokenizer, prepare, read_examples, recipe, talk, trained_text

from finetune.data.tokens import Encoder
from finetune.errors import DataError

U, A = {"role": "user", "content": "Is <image> a tag?"}, {"role": "assistant", "content": "Yes."}
DPO = "preference data .*DPO"


def test_what_is_left_out_on_purpose_does_not_stop_the_run(write):
    path = write("rows.jsonl", [{**talk("Hi", "Hello"), "label": True, "score": 3}])
    with pytest.raises(DataError, match="'label'.*1 row.*") as error:
        read_examples(recipe(path).dataset)
    assert {"ignore_columns": ["label", "score"]} in advised(error.value.fix)
    assert len(read_examples(recipe(path, ignore_columns=["label", "score"]).dataset).train.examples) == 1


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
    [example] = prepare(ignoring, build_tokenizer(), max_length=None).splits[0].examples
    assert example.messages[-1] == {"role": "assistant", "content": "4"}


def test_the_last_of_many_rows_can_ask(write):
    rows = [{"instruction": f"Do {n}", "output": f"Done {n}.", "flagged": True if n == 1_499 else None} for n in range(1_500)]
    with pytest.raises(DataError, match="flagged .truth values"):
        prepare(recipe(write("rows.jsonl", rows)), build_tokenizer(), max_length=None)
