"""The bundled dataset is tokenised by the bundled model's tokenizer without a warning."""

from small_data import prepare, read_examples, recipe

from finetune.data.tokenizer import load_tokenizer
from finetune.data.tokens import Encoder


def test_support_is_read_with_its_held_out_rows_and_nothing_is_refused():
    data_recipe = recipe("support", model_name_or_path="tiny")
    tokenizer = load_tokenizer(data_recipe)
    prepared = prepare(data_recipe, tokenizer, max_length=512)
    for report in (prepared.report, prepared.eval_report):
        assert report.rows_used == report.rows_read == report.sequences
        assert not report.warnings and not report.rows_refused
    assert prepared.report.rows_used >= 600 and prepared.eval_report.rows_used >= 100
    for example, row in zip(prepared.splits[1].examples, prepared.eval, strict=True):
        answer = [label for label in row["labels"] if label != -100]
        assert tokenizer.decode(answer) == f"{example.reference()}{tokenizer.eos_token}"


def test_prompts_of_held_out_rows_have_the_tokens_of_training():
    data_recipe = recipe("support", model_name_or_path="tiny")
    tokenizer = load_tokenizer(data_recipe)
    examples = read_examples(data_recipe.dataset).eval.examples[:20]
    encoder = Encoder(tokenizer, conversations=True)
    for example, [sequence] in zip(examples, encoder.encode(examples), strict=True):
        prompt_ids = encoder.prompt_ids(example.question())
        assert sequence.input_ids[: len(prompt_ids)].tolist() == prompt_ids and sequence.labels[len(prompt_ids)] != -100
