"""Files of other tools that train on pairs of answers: their losses, their datasets, and the methods that are not read."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from finetune.data import formats
from finetune.errors import RecipeError
from finetune.recipe.foreign import convert_text

FACTORY = "model_name_or_path: x/y\nfinetuning_type: lora\ndataset: pairs\nlearning_rate: 5e-6\nstage: {}\n"
AXOLOTL = "base_model: {model}\nadapter: lora\nlearning_rate: 1e-5\ndatasets: [{{path: x/z{dataset}}}]\nrl: {rl}\n"
TRL = "model_name_or_path: x/y\nuse_peft: true\ndataset_name: x/z\n"
PROMPT = {"role": "user", "content": "Hi"}


def axolotl(extra="", dataset=", type: chat_template.default", rl="dpo", model="x/y"):
    return convert_text(AXOLOTL.format(model=model, dataset=dataset, rl=rl) + extra, "x.yml")


def refusal(text: str, *overrides: str, folder=Path()) -> str:
    with pytest.raises(RecipeError) as error:
        convert_text(text, "x.yaml", overrides, folder)
    assert len(error.value.problems) == 1
    return error.value.problems[0]


def answers_of(row: dict, dataset) -> tuple:
    """Prompt and both answers of a row, as they are trained."""
    example = formats.parse(formats.rename_columns(row, dataset.columns), dataset.format, dataset.columns, "x", 1)
    if not example.messages:
        return example.prompt, example.completion, example.rejected_completion
    first = example.answers[0]
    return example.messages[:first], example.messages[first]["content"], example.rejected[0]["content"]


def settings_of(recipe) -> tuple:
    return recipe.method, recipe.beta, recipe.loss_type


# -- LLaMA-Factory


@pytest.mark.parametrize(
    ("entry", "row"),
    [
        ({"formatting": "sharegpt", "columns": {"messages": "conversations", "chosen": "chosen", "rejected": "rejected"}},
         {"conversations": [{"from": "human", "value": "Hi"}], "chosen": {"from": "gpt", "value": "A"},
          "rejected": {"from": "gpt", "value": "B"}}),
        ({"columns": {"prompt": "question", "chosen": "yes", "rejected": "no"}}, {"question": "Hi", "yes": "A", "no": "B"}),
        ({"formatting": "sharegpt", "columns": {"messages": "talk", "chosen": "yes", "rejected": "no"},
          "tags": {"role_tag": "role", "content_tag": "content", "user_tag": "user", "assistant_tag": "assistant"}},
         {"talk": [PROMPT], "yes": {"role": "assistant", "content": "A"}, "no": {"role": "assistant", "content": "B"}}),
    ],
)  # fmt: skip
def test_llama_factorys_ranking_datasets_are_pairs(tmp_path, entry, row):
    (tmp_path / "dataset_info.json").write_text(json.dumps({"pairs": {"file_name": "p.json", "ranking": True, **entry}}))
    recipe = convert_text(f"{FACTORY.format('dpo')}pref_loss: ipo\npref_beta: 0.2\n", "x", folder=tmp_path)[0]
    assert settings_of(recipe) == ("dpo", 0.2, "ipo")
    assert answers_of(row, recipe.dataset) == ((PROMPT,), "A", "B")


@pytest.mark.parametrize(
    ("extra", "reason"),
    [
        ("pref_bco_weight: 0.1", "another loss is added"), ("pref_loss: orpo", "ORPO has no such reference"),
        ("pref_loss: simpo", "SimPO has no such reference"), ("pref_loss: kto_pair", "marked good or bad"),
        ("dpo_label_smoothing: 0.1", "label smoothing"), ("ref_model: x/z", "the model without its adapter"),
        ("adapter_name_or_path: saves/sft", "there the reference is the base model"),
    ],
)  # fmt: skip
def test_llama_factorys_other_losses_on_pairs_are_refused(extra, reason):
    assert reason in refusal(f"{FACTORY.format('dpo')}{extra}\n", "dataset.path=d.jsonl")


@pytest.mark.parametrize(("stage", "ranking"), [("sft", True), ("dpo", False)])
def test_pairs_are_for_dpo_and_answers_for_sft(tmp_path, stage, ranking):
    (tmp_path / "dataset_info.json").write_text(json.dumps({"pairs": {"file_name": "p.json", "ranking": ranking}}))
    assert "pairs" in refusal(FACTORY.format(stage), folder=tmp_path)


# -- Axolotl


@pytest.mark.parametrize(
    ("dataset", "row"),
    [
        (", type: chatml.intel", {"system": "", "question": "Hi", "chosen": "A", "rejected": "B"}),
        (", type: llama3.icr", {"input": "Hi", "chosen": "A", "rejected": "B"}),
        (", type: chatml.prompt_pairs", {"prompt": "Hi", "chosen": "A", "rejected": "B"}),
        (", type: chatml.argilla", {"instruction": "Hi", "chosen_response": "A", "rejected_response": "B"}),
        (", type: chatml.ultra", {"prompt": "Hi", "chosen": [PROMPT, {"role": "assistant", "content": "A"}],
                                  "rejected": [PROMPT, {"role": "assistant", "content": "B"}]}),
        (", type: chat_template.argilla_chat", {"chosen": [PROMPT, {"role": "assistant", "content": "A"}],
                                                "rejected": [PROMPT, {"role": "assistant", "content": "B"}]}),
        (", type: chat_template.default, field_messages: talk, field_chosen: yes_",
         {"talk": [PROMPT], "yes_": {"role": "assistant", "content": "A"}, "rejected": "B"}),
    ],
)  # fmt: skip
def test_axolotls_types_of_pairs_are_conversations(dataset, row):
    source = axolotl("rl_beta: 0.3\n", dataset)
    assert settings_of(source[0]) == ("dpo", 0.3, "sigmoid")
    assert answers_of(row, source[0].dataset) == ((PROMPT,), "A", "B")
    assert any("model's own template" in note for note in source[1].notes) == ("chat_template" not in dataset)


@pytest.mark.parametrize(
    ("dataset", "row"),
    [
        (", type: {field_prompt: q, prompt_format: '{prompt}'}", {"q": "Hi", "chosen": "A", "rejected": "B"}),
        ("", {"prompt": "Hi", "chosen": "A", "rejected": "B"}),
    ],
)  # fmt: skip
def test_axolotls_pairs_without_a_template_stay_text(dataset, row):
    assert answers_of(row, axolotl(dataset=dataset)[0].dataset) == ("Hi", "A", "B")


@pytest.mark.parametrize(
    ("dataset", "reason"),
    [
        (", type: chatml", "name it: chatml.intel"), (", type: zephyr.nectar", "type zephyr.nectar is unknown"),
        (", type: {prompt_format: '<u>{prompt}'}", "prompt_format is text around the rows"),
    ],
)  # fmt: skip
def test_axolotls_other_types_of_pairs_are_refused_by_name(dataset, reason):
    assert reason in refusal(AXOLOTL.format(model="x/y", dataset=dataset, rl="dpo"))


def test_axolotls_ipo_is_a_loss_and_its_beta_has_two_keys():
    assert settings_of(axolotl("trl: {beta: 0.5}\nrl_beta: 0.1\n", rl="ipo")[0]) == ("dpo", 0.5, "ipo")
    assert settings_of(axolotl("dpo_loss_type: [apo_zero]\n")[0]) == ("dpo", 0.1, "apo_zero")
    with pytest.raises(RecipeError, match="one at a time"):
        axolotl("dpo_loss_type: [sigmoid, sft]\ndpo_loss_weights: [1.0]\n")


# -- TRL


@pytest.mark.parametrize(
    ("extra", "overrides", "expected"),
    [
        ("beta: 0.2\nlora_dropout: 0.1\n", (), ("dpo", 0.2, "sigmoid", 1e-6, 0.0)),
        ("loss_type: [hinge]\nlearning_rate: 5e-6\n", (), ("dpo", 0.1, "hinge", 5e-6, 0.0)),
        ("disable_dropout: false\n", (), ("dpo", 0.1, "sigmoid", 1e-6, 0.05)),
        ("", ("method=dpo",), ("dpo", 0.1, "sigmoid", 1e-6, 0.0)),
        ("", (), ("sft", None, None, 2e-5, 0.05)),
    ],
)  # fmt: skip
def test_a_trl_file_with_keys_of_dpo_is_dpos(extra, overrides, expected):
    recipe = convert_text(TRL + extra, "x", overrides)[0]
    assert (*settings_of(recipe), recipe.learning_rate, recipe.lora_dropout) == expected


@pytest.mark.parametrize(
    ("extra", "reason"),
    [
        ("label_smoothing: 0.1", "label smoothing"), ("loss_type: aot", "the losses of method dpo"),
        ("rpo_alpha: 1.0", "SFT's loss"), ("loss_type: dft", "cross entropy"),
        ("beta: 0.1\nassistant_only_loss: true", "key of `trl sft`"),
        ("beta: 0.1\nnum_generations: 8", "generated and rewarded"),
    ],
)  # fmt: skip
def test_trls_other_losses_and_methods_are_refused(extra, reason):
    assert reason in refusal(f"{TRL}{extra}\n")


# -- all


@pytest.mark.parametrize("method", ["orpo", "simpo", "grpo"])
def test_another_method_is_one_sentence_with_the_nearest(method):
    text = AXOLOTL.format(model="x/y", dataset=f", type: {method}.special", rl=method) + "orpo_alpha: 0.1\ntrl: {beta: 0.1}\n"
    assert "the nearest is method dpo" in refusal(text)
    assert "the nearest is method dpo" in refusal(FACTORY.format("ppo"))
