"""What an error says to type is typed, on the file that caused it: the rows are then read, and as they are meant."""

import re
import shlex
import shutil
import subprocess

import pytest
from small_data import advised, read_examples, recipe

from finetune.errors import DataError

ORDER = '{{"name": "shelf {n}"}}'
#: Name -> a row by number (as a template), and the answer that the first suggestion should teach.
FILES = {
    "text and output": ({"text": "Send shelf {n}.", "output": ORDER}, ORDER),
    "text and summary": ({"text": "Shelf {n} is here.", "summary": "A shelf {n}."}, "A shelf {n}."),
    "text and sentiment": ({"text": "Shelf {n} is here.", "sentiment": "good {n}"}, "good {n}"),
    "dialogue and summary": ({"dialogue": "A: Is it shelf {n}?", "summary": "A shelf {n}."}, "A shelf {n}."),
    "input and output": ({"input": "Shelf {n}?", "output": "Yes {n}."}, "Yes {n}."),
    "user and assistant": ({"user": "Shelf {n}?", "assistant": "Yes {n}."}, "Yes {n}."),
    "prompt and output": ({"prompt": "Shelf {n}?", "output": "Yes {n}."}, "Yes {n}."),
    "in capitals": ({"Question": "Shelf {n}?", "Answer": "Yes {n}."}, "Yes {n}."),
    "with spaces": ({" Instruction ": "Shelf {n}?", "Output ": "Yes {n}."}, "Yes {n}."),
    "any two names": ({"frage 1": "Shelf {n}?", "yes: or no": "Yes {n}."}, "Yes {n}."),
    "a passage": ({"question": "Where?", "answer": "Here {n}.", "passage": "Shelf {n} is here."}, "Here {n}."),
    "a context": ({"query": "Where?", "response": "Here {n}.", "context": "Shelf {n} is here."}, "Here {n}."),
    "chosen and rejected": ({"prompt": "Shelf {n}?", "chosen": "Yes {n}.", "rejected": "No.", "margin": "{n}.5"}, "Yes {n}."),
    "a conversation and two answers": (
        {"conversations": [{"from": "human", "value": "Shelf {n}?"}], "chosen": {"from": "gpt", "value": "Yes {n}."},
         "rejected": {"from": "gpt", "value": "No."}}, "Yes {n}.",
    ),
    "two dialogues": ({"chosen": "\n\nHuman: Shelf {n}?\n\nAssistant: Yes.", "rejected": "\n\nHuman: Shelf?"}, None),
    "a conversation of pairs": (
        {"system": "Be brief {n}.", "conversation": [{"human": "Shelf {n}?", "assistant": "Yes {n}."}]}, "Yes {n}.",
    ),
    "turns under another name": ({"dialog": [{"role": "user", "content": "{n}?"}, {"role": "bot", "content": "{n}."}]}, "{n}."),
    "a system prompt": (
        {"system_message": "Be number {n}.", "messages": [
            {"role": "user", "content": "{n}?"}, {"role": "assistant", "content": "{n}."}]}, "{n}.",
    ),
}  # fmt: skip


def filled(value, n):
    if isinstance(value, str):
        return value.format(n=n)
    return {k: filled(v, n) for k, v in value.items()} if isinstance(value, dict) else [filled(item, n) for item in value]


@pytest.mark.parametrize("name", FILES)
def test_each_suggestion_reads_the_file_that_caused_it(write, name):
    row, answer = FILES[name]
    path = write("rows.jsonl", [filled(row, n) for n in range(12)])
    with pytest.raises(DataError) as error:
        read_examples(recipe(path).dataset)
    suggestions = advised(error.value.fix)
    for settings in suggestions:
        rows = read_examples(recipe(path, **settings).dataset).train
        assert (len(rows.examples), rows.refused) == (12, [])
    first = read_examples(recipe(path, **suggestions[0]).dataset).train.examples[3]
    assert first.reference() == (answer and answer.format(n=3))
    whole = f"{first.question()}{first.text or ''}{first.reference()}"
    assert "3" in whole and not any("suggest" in str(text) for text in first.texts())


#: Letter -> the value of a column: question, context, reasoning, answer, score, and a text that must not be in the prompt.
VALUES = {
    "Q": "Is it Q{n}?",
    "C": "As C{n} says.",
    "R": "I think R{n}.",
    "A": "It is A{n}.",
    "S": "{n}.25",
    "X": "X{n} is here.",
}
COLUMNS = """
Question:Q Complex_CoT:R Response:A | Question:Q Context:C Complex_CoT:R Response:A | Problem:Q Thought:R Solution:A Score:S
prompt:Q reasoning:R completion:A | prompt:Q completion:A chain_of_thought:R | input:Q reasoning_content:R content:A score:S
text:Q reasoning:R answer:A | user:Q my_reasoning:R assistant:A | question:Q answer:A thinking:R cot:R | text:A prompt:Q
question:Q answer:A model_thoughts:R | question:Q answer:A gold_solution:X | question:Q answer:A score:S | output:A thing:Q
Question:Q Answer:A Rating:S | question:Q answer:A votes:S | question:Q answer:A kommentar:X | Question:Q Answer:A Explanation:X
problem:Q solution:X answer:A | answer_text:A label:S | rationale:R answer:A | reasoning_text:R answer:A
Question:Q chosen:A rejected:X | question_text:Q chosen:A rejected:X | instruction:Q input:C output:A context:X
system_prompt:C user_message:Q assistant_reply:A | source:S sentence:Q label:A
"""


@pytest.mark.parametrize("columns", re.split(r" \| |\n", COLUMNS.strip()))
def test_followed_advice_puts_no_reasoning_answer_or_score_into_the_prompt(write, columns):
    letters = dict(column.split(":") for column in columns.split())
    path = write("rows.jsonl", [{name: VALUES[letters[name]].format(n=n) for name in letters} for n in range(12)])
    with pytest.raises(DataError) as error:
        read_examples(recipe(path).dataset)
    thoughts = ""
    for settings in advised(error.value.fix):
        rows = read_examples(recipe(path, **settings).dataset).train
        assert (len(rows.examples), rows.refused) == (12, [])
        example = rows.examples[3]
        prompt, answer = str(example.question()), str(example.reference())
        thought = example.messages[-1].get("reasoning_content", "") if example.messages else ""
        assert not any(mark in prompt for mark in ("R3", "A3", "3.25", "X3"))
        assert not prompt or ("Q3" in prompt and "A3" in answer)
        assert "Q3" not in thought + answer and "R3" not in answer
        thoughts += thought
    assert ("R3" in thoughts) == {"R", "Q"}.issubset(letters.values())


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


@pytest.mark.skipif(shutil.which("jq") is None, reason="the advice calls jq")
def test_the_command_for_seed_tasks_makes_rows(write, tmp_path):
    instances = [{"input": "oak", "output": "table"}, {"input": "", "output": "chair"}]
    path = write("seeds.jsonl", [{"id": "seed_0", "instruction": "Name it", "instances": instances}])
    with pytest.raises(DataError) as error:
        read_examples(recipe(path).dataset)
    subprocess.run(error.value.fix.partition("  ")[2], shell=True, check=True, cwd=tmp_path)
    assert len(read_examples(recipe(str(tmp_path / "rows.jsonl")).dataset).train.examples) == 2


@pytest.mark.skipif(shutil.which("jq") is None, reason="the advice calls jq")
@pytest.mark.parametrize(("name", "good", "bad"), [("label", True, False), ("label", 1, 0), ("kto_tag", True, False)])
def test_the_command_for_labelled_answers_keeps_the_good_ones(write, tmp_path, name, good, bad):
    rows = [{"prompt": f"Shelf {n}?", "completion": f"Yes {n}.", name: good if n % 2 else bad} for n in range(6)]
    with pytest.raises(DataError) as error:
        read_examples(recipe(write("my rows.jsonl", rows)).dataset)
    (command,) = (line for line in error.value.fix.splitlines() if " jq " in line)
    subprocess.run(command.partition("  ")[2], shell=True, check=True, cwd=tmp_path)
    examples = read_examples(recipe(str(tmp_path / "good.jsonl")).dataset).train.examples
    assert [example.prompt for example in examples] == ["Shelf 1?", "Shelf 3?", "Shelf 5?"]


def test_names_that_yaml_or_a_shell_would_change_are_quoted():
    from finetune.data.column_advice import override
    from finetune.recipe import parse_recipe

    values: dict = {}
    columns = {"instruction": " a: [b], {c} ", "output": "it's #1", "input": "true"}
    for typed in (override("columns", columns), override("ignore_columns", list(columns.values()))):
        values |= advised(typed)[0]
        [argument] = shlex.split(typed)
        assert parse_recipe("model: tiny\ndataset: a.jsonl", overrides=[argument])
    assert values == {"columns": columns, "ignore_columns": list(columns.values())}
