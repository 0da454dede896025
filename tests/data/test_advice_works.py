"""What an error says to type is typed, on the file that caused it: the rows are then read, and as they are meant."""

import shlex

import pytest
from small_data import advised, read_examples, recipe

from finetune.errors import DataError


@pytest.mark.parametrize(
    ("row", "question", "answer"),
    [
        ({"Question": "Q{n}?", "Explanation": "Since {n}.", "Reply": "A{n}."}, "Question", "Reply"),
        ({"ticket": "T-{n}", "customer_message": "Q{n}?", "our_reply": "A{n}."}, "customer_message", "our_reply"),
        ({"system_prompt": "Be {n}.", "user_message": "Q{n}?", "assistant_reply": "A{n}."}, "user_message", "assistant_reply"),
        ({"answer": "A{n}.", "frage": "Q{n}?"}, "frage", "answer"),
        ({"frage 1": "Q{n}?", "yes: or no": "A{n}.", "votes": 3, "it's #1": None}, "frage 1", "yes: or no"),
        ({" Instruction ": "Q{n}?", "Output ": "A{n}."}, " Instruction ", "Output "),
    ],
)
def test_question_and_answer_are_suggested_by_their_names_or_as_the_only_texts(write, row, question, answer):
    rows = [{name: value.format(n=n) if isinstance(value, str) else value for name, value in row.items()} for n in range(9)]
    path = write("rows.jsonl", rows)
    with pytest.raises(DataError) as error:
        read_examples(recipe(path).dataset)
    [settings] = advised(error.value.fix)
    assert settings == {"columns": {"instruction": question, "output": answer}}
    others = [name for name in row if name not in (question, answer)]
    example = read_examples(recipe(path, **settings, ignore_columns=others).dataset).train.examples[3]
    assert (example.question()[-1]["content"], example.reference()) == ("Q3?", "A3.")


@pytest.mark.parametrize("columns", [["a", "b", "c"], ["question", "thoughts", "notes"], ["answer_id"]])
def test_other_columns_are_not_suggested(write, columns):
    with pytest.raises(DataError, match="no known format has these columns") as error:
        read_examples(recipe(write("rows.jsonl", [dict.fromkeys(columns, f"It is {n}.") for n in range(4)])).dataset)
    assert advised(error.value.fix) == []


TRANSCRIPTS = {
    "glaive": "USER: Hi, book it\n\n\nASSISTANT: For how many? <|endoftext|>\n\n\nUSER: Two\n\n\nASSISTANT: Done.",
    "vicuna": "A chat between a curious user and an assistant. USER: Hi ASSISTANT: Hello.</s>USER: Bye ASSISTANT: Bye.</s>",
    "anthropic": "\n\nHuman: Hi\n\nAssistant: Hello.", "guanaco": "### Human: Hi### Assistant: Hello.",
    "ChatML": "<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\nHello.<|im_end|>", "bold": "**User**: Hi\n**AI**: Hello.",
    "Llama 2": "<s>[INST] Hi [/INST] Hello.", "Gemma": "<start_of_turn>user\nHi<end_of_turn>\n<start_of_turn>model\nHello.",
}  # fmt: skip


@pytest.mark.parametrize("text", TRANSCRIPTS.values(), ids=TRANSCRIPTS)
@pytest.mark.parametrize("columns", ["chat", "system chat", "persona chat", "instruction output", "conversations"])
def test_a_conversation_in_one_text_is_called_a_transcript_and_never_advised(write, columns, text):
    *others, last = columns.split()
    path = write("rows.jsonl", [dict.fromkeys(others, f"Be brief, {n}.") | {last: text} for n in range(4)])
    with pytest.raises(DataError, match=f"'{last}' is a transcript") as error:
        read_examples(recipe(path).dataset)
    assert advised(error.value.fix) == []
    for name in others:
        with pytest.raises(DataError, match=f"'{last}' is a transcript"):
            read_examples(recipe(path, columns={"instruction": name, "output": last}).dataset)


def test_names_that_yaml_or_a_shell_would_change_are_quoted():
    from finetune.data.report import override
    from finetune.recipe import parse_recipe

    values: dict = {}
    columns = {"instruction": " a: [b], {c} ", "output": "it's #1", "input": "true"}
    for typed in (override("columns", columns), override("ignore_columns", list(columns.values()))):
        values |= advised(typed)[0]
        [argument] = shlex.split(typed)
        assert parse_recipe("model: tiny\ndataset: a.jsonl", overrides=[argument])
    assert values == {"columns": columns, "ignore_columns": list(columns.values())}
