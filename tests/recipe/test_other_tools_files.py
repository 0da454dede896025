"""Files of other tools as their users have them: what means the same is accepted, what differs is said, the rest is refused."""

from __future__ import annotations

import json
import re

import pytest
import yaml

from finetune.errors import RecipeError
from finetune.recipe import parse_recipe
from finetune.recipe.load import parse_source

AXOLOTL = "base_model: {model}\nadapter: qlora\nload_in_4bit: true\nlearning_rate: 1e-4\ndatasets: [{dataset}]\n{extra}\n"
TORCHTUNE = """
model: {{_component_: torchtune.models.gemma.qlora_gemma_7b, lora_attn_modules: [q_proj]}}
dataset: {{_component_: torchtune.datasets.{dataset}}}
tokenizer: {{_component_: torchtune.models.gemma.gemma_tokenizer, max_seq_len: {length}}}
checkpointer: {{checkpoint_dir: /tmp/gemma-7b}}
"""
UNSLOTH = "model: x/y\ndata: {{dataset: x/z}}\ntraining: {{max_seq_length: 2048{training}}}\nlora: {{lora_r: 16{lora}}}\n"


def axolotl(extra="", model="Qwen/Qwen2.5-7B-Instruct", dataset="{path: x/z, type: chat_template}"):
    return parse_source(AXOLOTL.format(model=model, dataset=dataset, extra=extra), "x.yml")


def refusals(text: str, *overrides: str) -> str:
    with pytest.raises(RecipeError) as error:
        parse_source(text, "x.yaml", overrides)
    return "\n".join([*error.value.problems, str(error.value.fix)])


# -- torchtune


@pytest.mark.parametrize("dataset", ["alpaca_dataset", "alpaca_cleaned_dataset"])
def test_torchtunes_prompt_around_alpaca_rows_is_said(dataset):
    source = parse_source(TORCHTUNE.format(dataset=dataset, length=512), "x.yaml")
    assert any("### Instruction" in note for note in source.conversion.notes)


def test_torchtune_without_a_limit_cuts_no_answer():
    source = parse_source(TORCHTUNE.format(dataset="alpaca_dataset", length="null"), "x.yaml")
    assert (source.recipe.max_length, source.recipe.excess_length) == ("auto", "raise")
    assert any("no row is cut" in note for note in source.conversion.notes)
    assert parse_source(TORCHTUNE.format(dataset="alpaca_dataset", length=512), "x.yaml").recipe.excess_length == "truncate"


def test_torchtunes_columns_are_those_of_its_dataset():
    mapped = "alpaca_dataset, column_map: {input: context, output: answer}"
    assert parse_source(TORCHTUNE.format(dataset=mapped, length=512), "x").recipe.dataset.columns == {
        "input": "context", "output": "answer"
    }  # fmt: skip
    plain = "instruct_dataset, source: x/z"
    assert parse_source(TORCHTUNE.format(dataset=plain, length=512), "x").recipe.dataset.columns == {"instruction": "input"}


def test_references_to_other_keys_are_followed():
    text = TORCHTUNE.format(dataset="alpaca_dataset", length=512).replace("/tmp/gemma-7b", '"${folder}/gemma-2b"')
    recipe = parse_source(
        f"{text}folder: /models\noutput_dir: ${{folder}}/out\nmetric_logger: {{log_dir: '${{output_dir}}'}}\n", "x"
    ).recipe
    assert (recipe.model_name_or_path, recipe.output_dir) == ("gemma-2b", "/models/out")
    assert "${folder} has no value" in refusals(text)


# -- LLaMA-Factory


def test_llama_factorys_default_template_is_not_the_models_own():
    text = "model_name_or_path: x/y\nstage: sft\nfinetuning_type: lora\ntemplate: {}\n"
    assert "not the template of" in refusals(text.format("default"), "dataset.path=d.jsonl")
    source = parse_source(text.format("empty"), "x", ["dataset.path=d.jsonl"])
    assert source.recipe.chat_template == "plain" and "### User" in source.conversion.notes[0]


def test_llama_factorys_v1_layout_is_read(tmp_path):
    (tmp_path / "data").mkdir()
    (tmp_path / "data" / "a.json").write_text(json.dumps([{"instruction": "x", "output": "y"}] * 4))
    datasets = {"a": {"path": "data/a.json", "source": "local", "converter": "alpaca", "size": 2}}
    (tmp_path / "data" / "list.yaml").write_text(yaml.safe_dump(datasets))
    text = "model: x/y\npeft_config: {name: lora, r: 32, target_modules: all}\nquant_config: {name: bnb, quantization_bit: 4}\n"
    text += "dist_config: {name: fsdp2}\nmicro_batch_size: 3\nmax_steps: 10\ntrain_dataset: data/list.yaml\n"
    source = parse_source(text, "x.yaml", ["launch.num_processes=2"], tmp_path)
    recipe = source.recipe
    assert source.conversion.tool == "LLaMA-Factory v1" and recipe.dataset.path == str(tmp_path / "data" / "a.json")
    assert (recipe.dataset.format, recipe.dataset.weights) == ("alpaca", [0.5])
    assert (recipe.lora_r, recipe.load_in_4bit, recipe.effective_batch_size, recipe.max_steps) == (32, True, 3 * 2, 10)
    assert "trains all parameters" in refusals("model: x/y\ndist_config: {name: fsdp2}\ntrain_dataset: d.jsonl\n")


# -- mlx-lm


def test_mlx_lms_last_layers_are_refused_or_said():
    text = "model: x/y\nfine_tune_type: lora\ndata: x/z\niters: 10\n"
    assert any("last 16 layers" in note for note in parse_source(text, "x").conversion.notes)
    assert not any("layers" in note for note in parse_source(f"{text}num_layers: -1\n", "x").conversion.notes)
    assert "num_layers=-1 is every layer" in refusals(f"{text}num_layers: 16\n")


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
    assert axolotl(extra, model).conversion.problems("x") == []


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
    assert source.recipe.optim == "adamw_8bit" and any("of 4 bits there" in note for note in source.conversion.notes)


def test_a_part_of_a_split_is_the_hubs_or_counted(tmp_path):
    def dataset(path, split):
        return axolotl(dataset=f"{{path: {path}, type: chat_template, split: '{split}'}}")

    assert dataset("mlabonne/FineTome-100k", "train[:20%]").recipe.dataset.split == "train[:20%]"
    share = dataset("rows.jsonl", "train[:20%]")
    assert share.recipe.dataset.weights == [0.2] and any("by seed" in note for note in share.conversion.notes)
    assert dataset("rows.jsonl", "train[:500]").recipe.dataset.max_rows == 500
    with pytest.raises(RecipeError, match="from the middle"):
        dataset("rows.jsonl", "train[20%:40%]")


def test_a_base_model_that_may_lack_the_named_template_is_said():
    assert any("no template of its own" in note for note in axolotl("chat_template: llama3", "x/Llama-3.2-1B").conversion.notes)
    assert not any("template" in note for note in axolotl("chat_template: llama3", "x/Llama-3.2-1B-Instruct").conversion.notes)


def test_layers_that_are_not_named_are_pefts_for_that_model():
    targets = lambda model: axolotl(model=model).recipe.target_modules  # noqa: E731
    assert targets("microsoft/phi-2") == ["q_proj", "v_proj", "fc1", "fc2"] and targets("x/pythia-1b") == ["query_key_value"]
    assert targets("microsoft/phi-4") == targets("tiiuae/Falcon3-7B-Instruct") == ["q_proj", "v_proj"]


def test_the_template_of_a_dataset_is_the_models_own_or_refused():
    template = "{path: x/z, type: chat_template, chat_template: llama3}"
    assert axolotl(model="meta-llama/Meta-Llama-3-8B-Instruct", dataset=template).recipe.dataset.path == "x/z"
    with pytest.raises(RecipeError, match="llama3 of a dataset"):
        axolotl(model="Qwen/Qwen3-8B", dataset=template)


def test_a_pattern_of_layers_matches_a_language_model_that_is_loaded_alone():
    pattern = axolotl(
        r"lora_target_modules: 'model.language_model.layers.[\d]+.(mlp|self_attn).(up|q)_proj'"
    ).recipe.target_modules
    for name in ("model.language_model.layers.3.mlp.up_proj", "model.layers.3.self_attn.q_proj"):
        assert re.fullmatch(pattern, name)
    assert not re.fullmatch(pattern, "model.vision_tower.layers.3.mlp.up_proj")


# -- YAML 1.1 in their files


def test_other_tools_files_are_read_as_yaml_1_1_and_recipes_stay_strict():
    recipe = axolotl("sequence_len: 8_192\nsample_packing: yes\ntrain_on_inputs: off\nseed: 0x10").recipe
    assert (recipe.max_length, recipe.packing, recipe.train_on_inputs, recipe.seed) == (8192, True, False, 16)
    for line in ("max_length: 8_192", "packing: yes", "seed: 010"):
        with pytest.raises(RecipeError):
            parse_recipe(f"model: x\ndataset: d\n{line}\n")


def test_anchors_and_merge_keys_are_followed_in_their_files_only():
    text = "common: &c {path: x/z, type: chat_template}\n"
    with pytest.raises(RecipeError, match="aliases"):
        parse_recipe("model: &m x\ndataset: d\nchat_template: *m\n")
    merged = "model: x/y\ndata: &d {dataset: x/z}\ntraining: &t {max_seq_length: 1024, batch_size: 3}\nlora: {lora_r: 8}\n"
    assert parse_source(merged + "export: {<<: *t, batch_size: 1}\n", "x").recipe.max_length == 1024
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


@pytest.mark.parametrize(
    ("text", "tool", "setting"),
    [
        ("checkpoint_dir: c/x\nout_dir: o\nprecision: bf16-true\nlora_r: 32\ntrain: {epochs: 1}\n", "LitGPT's",
         "train.epochs is num_train_epochs"),
        ("model: {model_name: x/y}\ntraining: {trainer_type: TRL_SFT}\npeft: {lora_r: 8}\n", "Oumi's", "peft.lora_r is lora_r"),
        ("task: llm-sft\nbase_model: x/y\nproject_name: p\nparams: {lr: 1e-4}\n", "AutoTrain's", "params.lr is learning_rate"),
        ("model_id_or_path: x\ndata: {instruct_data: d}\nlora: {rank: 8}\n", "mistral-finetune's", "lora.rank is lora_r"),
        ("model: x/y\ntuner_type: lora\nlora_rank: 8\ndataset: [a]\n", "ms-swift's", "lora_rank is lora_r"),
        ("model: x/y\nrlhf_type: kto\nbeta: 0.1\ndesirable_weight: 1\n", "ms-swift's", "rlhf_type is method"),
        ("models: [a, b]\nmerge_method: slerp\n", "mergekit's", "finetune merge"),
        ("compute_environment: LOCAL_MACHINE\nnum_processes: 2\n", "Accelerate's", "launch.num_processes"),
    ],
)  # fmt: skip
def test_the_file_of_a_tool_that_is_not_read_gets_one_sentence(text, tool, setting):
    with pytest.raises(RecipeError) as error:
        parse_source(text, "x.yaml")
    assert len(error.value.problems) == 1 and f"this looks like {tool} configuration" in error.value.problems[0]
    assert setting in error.value.fix


# -- Unsloth Studio


def test_steps_replace_epochs_of_zero_in_the_studios_defaults():
    recipe = parse_source(UNSLOTH.format(training=", num_epochs: 0, max_steps: 30", lora=""), "x").recipe
    assert recipe.max_steps == 30
    recipe = parse_source(
        UNSLOTH.format(training=", num_epochs: 2, max_steps: 0, warmup_steps: 5, warmup_ratio: 0.1", lora=""), "x"
    ).recipe
    assert (recipe.max_steps, recipe.num_train_epochs, recipe.warmup_ratio, recipe.warmup_steps) == (None, 2, 0.1, None)


def test_the_studios_vision_files_are_refused_and_no_layers_are_all():
    assert "images" in refusals(UNSLOTH.format(training="", lora=", vision_all_linear: true"))
    vision = UNSLOTH.format(training="", lora=", finetune_vision_layers: true")
    assert "language model only" in "\n".join(parse_source(vision, "x", ["model=x/Qwen3-VL-8B"]).conversion.notes)
    assert "language model only" not in "\n".join(parse_source(vision, "x", ["model=x/Qwen3-8B"]).conversion.notes)
    targets = parse_source(UNSLOTH.format(training="", lora=', target_modules: ""'), "x").recipe.target_modules
    assert len(targets) == 7 and "down_proj" in targets


# -- TRL


def test_trls_own_example_needs_only_the_adapter():
    text = "model_name_or_path: Qwen/Qwen2.5-0.5B\ndataset_name: stanfordnlp/imdb\nlearning_rate: 0.0001\n"
    problems = refusals(text)
    assert problems.count("x.yaml") == 1 and "is not set, which trains all parameters" in problems
    source = parse_source(text, "x", ["use_peft=true"])
    assert source.recipe.train_on_inputs and any("train_on_inputs=false" in note for note in source.conversion.notes)
    quiet = parse_source(f"{text}dataset_text_field: text\n", "x", ["use_peft=true"])
    assert quiet.recipe.train_on_inputs and not any("train_on_inputs" in note for note in quiet.conversion.notes)


def test_a_trl_file_without_its_own_keys_is_still_trls():
    text = "model_name_or_path: x/y\nmax_seq_length: 512\neval_strategy: epoch\nlogging_steps: 5\nsave_strategy: 'no'\n"
    assert "use_peft" in refusals(text)
    mixture = "{datasets: [{id: x/z, split: train_sft, columns: [messages], weight: 1.0}, {id: x/z, split: test_sft}], "
    dataset = parse_source(f"{text}use_peft: true\ndataset_mixture: {mixture}test_split_size: 100}}\n", "x").recipe.dataset
    assert (dataset.path, dataset.split, dataset.test_split_size) == ("x/z", "train_sft+test_sft", 100)
