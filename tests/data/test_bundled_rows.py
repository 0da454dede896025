"""The bundled dataset is tokenised by the bundled model's tokenizer without a warning."""

from small_data import recipe

from finetune.data import load_tokenizer, mark_example, prepare, read_examples
from finetune.data.tokens import Encoder


def test_support_is_read_with_its_held_out_rows_and_nothing_is_refused():
    chosen = recipe("support", model_name_or_path="tiny")
    tokenizer = load_tokenizer(chosen)
    prepared = prepare(chosen, tokenizer, max_length=512)
    for report in (prepared.report, prepared.eval_report):
        assert report.rows_used == report.rows_read == report.sequences
        assert not report.warnings and not report.rows_refused
    assert prepared.report.rows_used >= 600 and prepared.eval_report.rows_used >= 100
    for example, row in zip(prepared.eval_examples, prepared.eval, strict=True):
        answer = [label for label in row["labels"] if label != -100]
        assert tokenizer.decode(answer) == f"{example.reference()}{tokenizer.eos_token}"


def test_the_bundled_example_is_marked_from_answer_to_end_token():
    chosen = recipe("support", model_name_or_path="tiny", max_rows=3)
    tokenizer = load_tokenizer(chosen)
    prepared = prepare(chosen, tokenizer, max_length=None)
    [answer] = [text for text, trained in mark_example(prepared, tokenizer, 2) if trained]
    assert answer == prepared.examples[2].reference() + tokenizer.eos_token


def test_questions_of_held_out_rows_are_asked_as_they_were_taught():
    chosen = recipe("support", model_name_or_path="tiny")
    tokenizer = load_tokenizer(chosen)
    examples = read_examples(chosen.dataset).eval.examples[:20]
    encoder = Encoder(tokenizer, conversations=True)
    for example, [one] in zip(examples, encoder.encode(examples), strict=True):
        asked = encoder.prompt_ids(example.question())
        assert one.input_ids[: len(asked)].tolist() == asked and one.labels[len(asked)] != -100
