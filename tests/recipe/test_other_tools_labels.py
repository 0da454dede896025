"""Files of other tools that train on answers marked good or bad (KTO)."""

import json

import pytest
from test_other_tools_pairs import AXOLOTL, FACTORY, PROMPT, TRL, axolotl, refusal

from finetune.data import formats
from finetune.recipe.foreign import convert_text


def answer_of(row: dict, dataset) -> tuple:
    """Prompt, answer and label of a row, as they are trained."""
    example = formats.parse(formats.rename_columns(row, dataset.columns), dataset.format, dataset.columns, "x", 1)
    if not example.messages:
        return example.prompt, example.completion, example.desirable
    (answer,) = example.answers
    return example.messages[:answer], example.messages[answer]["content"], example.desirable


@pytest.mark.parametrize(
    ("entry", "row"),
    [
        ({"columns": {"prompt": "instruction", "response": "output", "kto_tag": "good"}},
         {"instruction": "Hi", "output": "A", "good": True}),
        ({"formatting": "sharegpt", "columns": {"messages": "messages", "kto_tag": "label"},
          "tags": {"role_tag": "role", "content_tag": "content", "user_tag": "user", "assistant_tag": "assistant"}},
         {"messages": [PROMPT, {"role": "assistant", "content": "A"}], "label": True}),
    ],
)  # fmt: skip
def test_llama_factorys_kto_datasets_are_labelled(tmp_path, entry, row):
    (tmp_path / "dataset_info.json").write_text(json.dumps({"pairs": {"file_name": "p.json", **entry}}))
    text = f"{FACTORY.format('kto')}pref_beta: 0.2\nkto_rejected_weight: 0.5\n"
    recipe = convert_text(text, "x", folder=tmp_path)[0]
    assert (recipe.method, recipe.beta, recipe.loss_type, recipe.undesirable_weight) == ("kto", 0.2, "kto", 0.5)
    assert answer_of(row, recipe.dataset) == ((PROMPT,), "A", True)
    assert "marked good or bad, for stage kto" in refusal(FACTORY.format("sft"), folder=tmp_path)
    assert "SFT's loss" in refusal(f"{FACTORY.format('kto')}pref_ftx: 0.1\n", folder=tmp_path)


@pytest.mark.parametrize(
    ("dataset", "row"),
    [
        (", type: chatml.intel", {"question": "Hi", "completion": "A", "label": False}),
        (", type: llama3.ultra", {"prompt": "Hi", "completion": "A", "label": False}),
        (", type: chatml.argilla", {"instruction": "Hi", "completion": "A", "label": False}),
        (", type: chatml.argilla_chat", {"completion": [PROMPT, {"role": "assistant", "content": "A"}], "label": False}),
    ],
)  # fmt: skip
def test_axolotls_types_of_labels_are_conversations(dataset, row):
    recipe = axolotl("rl_beta: 0.3\nkto_desirable_weight: 2\nmicro_batch_size: 4\n", dataset, rl="kto")[0]
    assert (recipe.method, recipe.beta, recipe.loss_type, recipe.desirable_weight) == ("kto", 0.3, "kto", 2.0)
    assert answer_of(row, recipe.dataset) == ((PROMPT,), "A", False)


def in_fours(dataset: str) -> str:
    return AXOLOTL.format(model="x/y", dataset=dataset, rl="kto") + "micro_batch_size: 4\n"


def test_axolotls_other_types_of_labels_are_refused_by_name():
    assert "unknown for method kto" in refusal(in_fours(", type: chatml"))
    own = ", type: {field_prompt: q, completion_format: '<a>{completion}'}"
    assert "completion_format is text around" in refusal(in_fours(own))


@pytest.mark.parametrize(
    ("extra", "overrides", "expected"),
    [
        ("loss_type: apo_zero_unpaired\nbeta: 0.2\n", (), ("kto", 0.2, "apo_zero_unpaired", None)),
        ("undesirable_weight: 0.7\n", (), ("kto", 0.1, "kto", 0.7)),
        ("", ("method=kto",), ("kto", 0.1, "kto", None)),
    ],
)
def test_a_trl_file_with_keys_of_kto_is_ktos(extra, overrides, expected):
    recipe = convert_text(TRL + extra, "x", overrides)[0]
    assert (recipe.method, recipe.beta, recipe.loss_type, recipe.undesirable_weight) == expected
    assert (recipe.learning_rate, recipe.lora_dropout) == (1e-6, 0.0)
