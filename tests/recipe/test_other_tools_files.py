"""Files of other tools as their users have them: what means the same is accepted, what differs is said, the rest is refused."""

from __future__ import annotations

import re

import pytest

from finetune.errors import RecipeError
from finetune.recipe import parse_recipe
from finetune.recipe.foreign import convert_text

AXOLOTL = "base_model: {model}\nadapter: qlora\nload_in_4bit: true\nlearning_rate: 1e-4\ndatasets: [{dataset}]\n{extra}\n"


def axolotl(extra="", model="Qwen/Qwen2.5-7B-Instruct", dataset="{path: x/z, type: chat_template}"):
    return convert_text(AXOLOTL.format(model=model, dataset=dataset, extra=extra), "x.yml")


def refusals(text: str, *overrides: str) -> str:
    with pytest.raises(RecipeError) as error:
        convert_text(text, "x.yaml", overrides)
    return "\n".join([*error.value.problems, str(error.value.fix)])


# -- LLaMA-Factory


def test_llama_factorys_default_template_is_not_the_models_own():
    text = "model_name_or_path: x/y\nstage: sft\nfinetuning_type: lora\ntemplate: {}\n"
    assert "not the template of" in refusals(text.format("default"), "dataset.path=d.jsonl")
    source = convert_text(text.format("empty"), "x", ["dataset.path=d.jsonl"])
    assert source[0].chat_template == "plain" and "### User" in source[1].notes[0]


# -- Axolotl


@pytest.mark.parametrize(
    ("model", "extra"),
    [
        ("Qwen/Qwen3-8B", "optimizer: adamw_torch_8bit"), ("Qwen/Qwen3-8B", "optimizer: adamw_torch_4bit"),
        ("Qwen/Qwen3-8B", "eot_tokens: ['<|im_end|>']\nspecial_tokens: {eos_token: '<|im_end|>'}"),
        ("google/gemma-3-4b-it", "eot_tokens: [<end_of_turn>]\nchat_template: gemma3"),
        ("google/gemma-4-12B-it", "chat_template: gemma4_unified\neot_tokens: [<turn|>]"),
        ("meta-llama/Llama-4-Scout-17B-16E", "chat_template: llama4\nspecial_tokens: {eos_token: <|eot|>}"),
        ("tiiuae/Falcon-H1-7B-Base", "chat_template: falcon_h1"), ("ai21labs/AI21-Jamba-1.5-Large", "chat_template: jamba"),
        ("x/y", "bnb_config_kwargs: {bnb_4bit_use_double_quant: true}"), ("x/y", "use_kernels: false\ndp_shard_size: 1"),
        ("x/y", "liger_rms_norm_gated: true\nfused_attn_kernel: true\nexperimental_skip_move_to_device: true"),
        ("x/y", "tokenizer_use_mistral_common: true\nplugins: [axolotl.integrations.kernels.KernelsPlugin]"),
    ],
)  # fmt: skip
def test_axolotl_files_that_mean_what_finetune_does_are_accepted(model, extra):
    assert axolotl(extra, model)[1].problems("x") == []


@pytest.mark.parametrize(
    "extra",
    [
        "bnb_config_kwargs: {bnb_4bit_use_double_quant: false}", "eot_tokens: ['<end>']",
        "special_tokens: {eos_token: '<end>'}",
        "chat_template: gemma3", "plugins: [axolotl.integrations.diffusion.DiffusionPlugin]",
    ],
)  # fmt: skip
def test_axolotl_files_that_mean_something_else_are_refused(extra):
    with pytest.raises(RecipeError, match=extra.partition(":")[0]):
        axolotl(extra)


def test_axolotls_other_adamw_is_eight_bit_with_a_note():
    source = axolotl("optimizer: adamw_torch_4bit")
    assert source[0].optim == "adamw_8bit" and any("of 4 bits there" in note for note in source[1].notes)


def test_a_part_of_a_split_is_the_hubs_or_counted(tmp_path):
    def dataset(path, split):
        return axolotl(dataset=f"{{path: {path}, type: chat_template, split: '{split}'}}")

    assert dataset("mlabonne/FineTome-100k", "train[:20%]")[0].dataset.split == "train[:20%]"
    share = dataset("rows.jsonl", "train[:20%]")
    assert share[0].dataset.weights == [0.2] and any("by seed" in note for note in share[1].notes)
    assert dataset("rows.jsonl", "train[:500]")[0].dataset.max_rows == 500
    with pytest.raises(RecipeError, match="from the middle"):
        dataset("rows.jsonl", "train[20%:40%]")


def test_a_base_model_that_may_lack_the_named_template_is_said():
    assert any("no template of its own" in note for note in axolotl("chat_template: llama3", "x/Llama-3.2-1B")[1].notes)
    assert not any("template" in note for note in axolotl("chat_template: llama3", "x/Llama-3.2-1B-Instruct")[1].notes)


def test_layers_that_are_not_named_are_pefts_for_that_model():
    targets = lambda model: axolotl(model=model)[0].target_modules  # noqa: E731
    assert targets("microsoft/phi-2") == ["q_proj", "v_proj", "fc1", "fc2"] and targets("x/pythia-1b") == ["query_key_value"]
    assert targets("microsoft/phi-4") == targets("tiiuae/Falcon3-7B-Instruct") == ["q_proj", "v_proj"]


def test_the_template_of_a_dataset_is_the_models_own_or_refused():
    template = "{path: x/z, type: chat_template, chat_template: llama3}"
    assert axolotl(model="meta-llama/Meta-Llama-3-8B-Instruct", dataset=template)[0].dataset.path == "x/z"
    with pytest.raises(RecipeError, match="llama3 of a dataset"):
        axolotl(model="Qwen/Qwen3-8B", dataset=template)


def test_a_pattern_of_layers_matches_a_language_model_that_is_loaded_alone():
    pattern = axolotl(
        r"lora_target_modules: 'model.language_model.layers.[\d]+.(mlp|self_attn).(up|q)_proj'"
    )[0].target_modules
    for name in ("model.language_model.layers.3.mlp.up_proj", "model.layers.3.self_attn.q_proj"):
        assert re.fullmatch(pattern, name)
    assert not re.fullmatch(pattern, "model.vision_tower.layers.3.mlp.up_proj")


# -- YAML 1.1 in their files


def test_other_tools_files_are_read_as_yaml_1_1_and_recipes_stay_strict():
    recipe = axolotl("sequence_len: 8_192\nsample_packing: yes\ntrain_on_inputs: off\nseed: 0x10")[0]
    assert (recipe.max_length, recipe.packing, recipe.train_on_inputs, recipe.seed) == (8192, True, False, 16)
    for line in ("max_length: 8_192", "packing: yes", "seed: 010"):
        with pytest.raises(RecipeError):
            parse_recipe(f"model: x\ndataset: d\n{line}\n")


def test_anchors_and_merge_keys_are_followed_in_their_files_only():
    text = "common: &c {path: x/z, type: chat_template}\n"
    with pytest.raises(RecipeError, match="aliases"):
        parse_recipe("model: &m x\ndataset: d\nchat_template: *m\n")
    assert "common" in refusals(text + AXOLOTL.format(model="x/y", dataset="*c", extra=""))


@pytest.mark.parametrize("bomb", ["a: &a [*a]", "a: &a [1, 1]\n" + "".join(
    f"{new}: &{new} [{', '.join([f'*{old}'] * 9)}]\n" for old, new in zip("abcdefgh", "bcdefghi", strict=True)
)])  # fmt: skip
def test_aliases_that_grow_without_end_are_refused(bomb):
    assert "nested too deep or too long" in refusals(f"adapter: lora\n{bomb}")


# -- secrets


@pytest.mark.parametrize("key", ["pad_token", "tokenizer_pad_token", "eos_token"])
def test_a_token_of_the_vocabulary_is_no_secret(key):
    with pytest.raises(RecipeError) as error:
        parse_recipe(f'model: x\ndataset: d\n{key}: "<|endoftext|>"\n')
    assert "secret" not in str(error.value) and key in str(error.value)
    with pytest.raises(RecipeError, match="secrets don't belong"):
        parse_recipe("model: x\ndataset: d\nhub_token: abc\n")


# -- tools that are not read


# -- TRL


def test_trls_own_example_needs_only_the_adapter():
    text = "model_name_or_path: Qwen/Qwen2.5-0.5B\ndataset_name: stanfordnlp/imdb\nlearning_rate: 0.0001\n"
    problems = refusals(text)
    assert problems.count("x.yaml") == 1 and "is not set, which trains all parameters" in problems
    source = convert_text(f"{text}use_peft: true\n", "x")
    assert source[0].train_on_inputs and any("train_on_inputs=false" in note for note in source[1].notes)
    quiet = convert_text(f"{text}use_peft: true\ndataset_text_field: text\n", "x")
    assert quiet[0].train_on_inputs and not any("train_on_inputs" in note for note in quiet[1].notes)


def test_a_trl_file_without_its_own_keys_is_still_trls():
    text = "model_name_or_path: x/y\nmax_seq_length: 512\neval_strategy: epoch\nlogging_steps: 5\nsave_strategy: 'no'\n"
    assert "use_peft" in refusals(text)
    mixture = "{datasets: [{id: x/z, split: train_sft, columns: [messages], weight: 1.0}, {id: x/z, split: test_sft}], "
    dataset = convert_text(f"{text}use_peft: true\ndataset_mixture: {mixture}test_split_size: 100}}\n", "x")[0].dataset
    assert (dataset.path, dataset.split, dataset.test_split_size) == ("x/z", "train_sft+test_sft", 100)
