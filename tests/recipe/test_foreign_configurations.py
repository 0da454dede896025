"""Configurations of other tools are read as recipes: no key is lost, nothing is guessed, and the numbers are the tool's."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import yaml

from finetune.errors import RecipeError
from finetune.recipe import parse_recipe, write_recipe
from finetune.recipe.foreign import TOOLS, convert_file, convert_text
from finetune.settings.schema import Recipe

HERE = Path(__file__).parent / "foreign"
#: file: effective batch, peak learning rate, rank, alpha, epochs, steps, length, steps and share of warmup, 4 bit; by hand.
EXPECTED = {
    "lf_qwen3_lora.yaml": (1 * 8, 1e-4, 8, 2 * 8, 3, None, 2048, None, 0.1, False),
    "lf_llama3_lora_eval.yaml": (2 * 4, 5e-5, 16, 16, 2, None, 1024, 20, None, False),
    "lf_llama3_qlora.yaml": (1 * 8, 1e-4, 8, 2 * 8, 3, None, 2048, None, 0.1, True),
    "lf_least.yaml": (8 * 1, 5e-5, 8, 2 * 8, 3, None, 2048, None, 0, False),
    "lf_deepspeed.yaml": (2 * 2, 2e-4, 32, 2 * 32, 3, 300, 4096, None, 0, False),
    "axolotl_qlora_1b.yml": (2 * 4, 2e-4, 32, 16, 1, None, 2048, None, 0.1, True),
    "axolotl_lora_1b.yml": (2 * 2, 2e-4, 16, 32, 1, None, 1024, 10, None, False),
    "axolotl_instruct_8b.yml": (2 * 4, 2e-4, 32, 16, 4, None, 4096, 10, None, False),
    "axolotl_mistral_qlora.yml": (2 * 4, 2e-4, 32, 16, 1, None, 8192, 10, None, True),
    "axolotl_qwen2_fsdp.yaml": (1 * 4, 2e-4, 32, 64, 4, None, 2048, 10, None, True),
    "trl_sft.yaml": (2 * 8, 2e-4, 32, 64, 1, None, 1024, None, 0, False),
}  # fmt: skip


def keys_of(values, prefix=""):
    for key, value in values.items():
        yield prefix + key
        if isinstance(value, dict):
            yield from keys_of(value, f"{prefix}{key}.")


@pytest.mark.parametrize("name", EXPECTED)
def test_numbers_are_the_other_tools_numbers(name):
    recipe = convert_file(str(HERE / name), [])[0]
    batch, rate, rank, alpha, epochs, steps, length, warmup, share, four_bit = EXPECTED[name]
    assert recipe.effective_batch_size == batch and recipe.learning_rate == pytest.approx(rate, rel=1e-12)
    assert (recipe.lora_r, recipe.lora_alpha, recipe.max_length, recipe.max_steps) == (rank, alpha, length, steps)
    assert steps or recipe.num_train_epochs == epochs
    assert recipe.warmup_steps == warmup and (share is None or recipe.warmup_ratio == share)
    assert recipe.load_in_4bit == four_bit


@pytest.mark.parametrize("name", EXPECTED)
def test_every_key_is_accounted_for_with_its_line(name):
    text = (HERE / name).read_text()
    entries = {entry.key: entry for entry in convert_file(str(HERE / name), [])[1].entries}
    accounted = set(entries) | {key.rpartition(".")[0] for key in entries} | set(yaml.safe_load(text))
    assert set(keys_of(yaml.safe_load(text))) - accounted <= {
        key
        for key in keys_of(yaml.safe_load(text))
        if key.partition(".")[0] in ("special_tokens", "fsdp_config", "gradient_checkpointing_kwargs")
    }
    lines = text.splitlines()
    for key, entry in entries.items():
        assert lines[entry.line - 1].lstrip().startswith(key.split(".")[-1]), key
    assert {key.partition(".")[0] for key in entries} == set(yaml.safe_load(text))


@pytest.mark.parametrize("name", EXPECTED)
def test_the_converted_recipe_is_the_same_recipe(name):
    recipe = convert_file(str(HERE / name), [])[0]
    assert parse_recipe(write_recipe(recipe)) == recipe


@pytest.mark.parametrize("tool", TOOLS, ids=lambda tool: tool.name)
def test_tables_name_settings_that_exist(tool):
    for rule in tool.keys.values():
        for name in (getattr(rule, "setting", ""), getattr(rule, "lifted_by", "")):
            section, _, inner = name.partition(".")
            assert not name or section in Recipe.model_fields, name
            assert not inner or inner in Recipe.model_fields[section].annotation.model_fields, name
    assert {name.partition(".")[0] for name in tool.defaults} <= set(Recipe.model_fields)


@pytest.mark.parametrize(
    ("extra", "message"),
    [
        ("stage: ppo", "stage ppo: the nearest is method dpo"), ("finetuning_type: full", "finetune trains LoRA adapters"),
        ("pissa_init: true", "PiSSA"), ("mask_history: true", "every answer"), ("neftune_noise_alpha: 5", "NEFTune"),
        ("quantization_bit: 3", "4 and 8 bits"), ("template: alpaca", "not the template of"), ("dataset: pairs", "stage dpo"),
        ("dataset: films", "video or sound"), ("dataset: nowhere", "is not in"), ("hf_hub_token: x", "secrets"),
        ("what_is_this: 1", "not a key of LLaMA-Factory"), ("lr_scheduler_type: polynomial", "it should be"),
    ],
)  # fmt: skip
def test_what_would_change_the_result_is_refused(extra, message):
    text = (HERE / "lf_least.yaml").read_text()
    text = "\n".join(line for line in text.splitlines() if not line.startswith(extra.partition(":")[0])) + f"\n{extra}\n"
    with pytest.raises(RecipeError) as error:
        convert_text(text, "x.yaml", folder=HERE)
    assert len(error.value.problems) == 1 and message in error.value.problems[0]
    assert error.value.problems[0].startswith(f"x.yaml:{len(text.splitlines())}:")


def test_all_refusals_come_at_once():
    text = "base_model: x/y\nadapter: lora\ndatasets: [{path: a, type: mystery}]\nlearning_rate: 1e-4\n" + "".join(
        f"{key}: true\n" for key in ("rl", "qat", "gptq", "s2_attention", "use_pose", "relora")
    )
    with pytest.raises(RecipeError) as error:
        convert_text(text, "x.yml")
    assert len(error.value.problems) == 7


def test_overrides_lift_refusals():
    recipe, _ = convert_file(str(HERE / "lf_least.yaml"), ["dataset.path=mine.jsonl", "chat_template=null", "lora_r=64"])
    assert (recipe.dataset.path, recipe.lora_r, recipe.chat_template) == ("mine.jsonl", 64, None)


def test_the_effective_batch_grows_with_the_cards():
    recipe, _ = convert_file(str(HERE / "axolotl_qwen2_fsdp.yaml"), ["launch.num_processes=4"])
    assert recipe.effective_batch_size == 1 * 4 * 4


def test_dataset_info_becomes_the_dataset_section():
    text = (HERE / "lf_least.yaml").read_text()
    talk = convert_text(text.replace("identity", "talk"), "x", folder=HERE)[0].dataset
    assert (talk.path, talk.format, talk.columns) == (str(HERE / "data" / "talk.jsonl"), "messages", {"messages": "turns"})
    questions = convert_text(text.replace("identity", "questions"), "x", folder=HERE)[0].dataset
    assert (questions.path, questions.name, questions.format) == ("someone/questions", "en", "alpaca")
    assert questions.columns == {"instruction": "question", "output": "response"} or questions.columns == {
        "instruction": "question", "output": "answer"
    }  # fmt: skip


def test_pictures_of_llama_factory_start_in_the_folder_of_its_datasets(tmp_path):
    text = (HERE / "lf_least.yaml").read_text().replace("identity", "pictures")
    dataset = convert_text(text, "x", folder=HERE)[0].dataset
    assert (dataset.columns, dataset.image_folder) == ({"images": "photos"}, None)
    assert convert_text(f"{text}\nmedia_dir: photos", "x", folder=HERE)[0].dataset.image_folder == "photos"
    info = {
        "pictures": {"file_name": "rows/p.json", "columns": {"prompt": "instruction", "response": "output", "images": "images"}}
    }
    (tmp_path / "dataset_info.json").write_text(json.dumps(info))
    inner = convert_text(f"{text}\ndataset_dir: {tmp_path}", "x", folder=tmp_path)[0].dataset
    assert inner.image_folder == str(tmp_path)


def test_a_limit_of_each_dataset_is_a_share_of_those_that_are_larger(tmp_path):
    (tmp_path / "dataset_info.json").write_text('{"a": {"file_name": "a.jsonl"}, "b": {"file_name": "b.jsonl"}}')
    (tmp_path / "a.jsonl").write_text('{"instruction": "x", "output": "y"}\n' * 20)
    (tmp_path / "b.jsonl").write_text('{"instruction": "x", "output": "y"}\n' * 5)
    text = f"model_name_or_path: x/y\nstage: sft\ndataset_dir: {tmp_path}\ndataset: a,b\nmax_samples: "
    assert convert_text(f"{text}10", "x", folder=tmp_path)[0].dataset.weights == [0.5, 1.0]
    assert convert_text(f"{text}20", "x", folder=tmp_path)[0].dataset.weights is None
    (tmp_path / "b.jsonl").unlink()
    with pytest.raises(RecipeError, match="for each dataset there"):
        convert_text(f"{text}10", "x", folder=tmp_path)


def test_a_list_of_datasets_keeps_their_formats_and_numbers_of_rows(tmp_path):
    info = {
        "a": {"file_name": "a.json", "num_samples": 1},
        "b": {"file_name": "b.jsonl", "formatting": "sharegpt", "num_samples": 6},
        "c": {"file_name": "c.json"},
    }
    (tmp_path / "dataset_info.json").write_text(json.dumps(info))
    (tmp_path / "a.json").write_text(json.dumps([{"instruction": "x", "output": "y"}] * 4))
    (tmp_path / "b.jsonl").write_text('{"conversations": []}\n' * 4)
    text = f"model_name_or_path: x/y\nfinetuning_type: lora\nstage: sft\ntemplate: empty\ndataset_dir: {tmp_path}\ndataset: "
    merged = convert_text(f"{text}a,b,c", "x", folder=tmp_path)[0].dataset
    assert [Path(path).name for path in merged.path] == ["a.json", "b.jsonl", "c.json"]
    assert (merged.format, merged.weights) == ("auto", [0.25, 1.5, 1.0])
    assert convert_text(f"{text}c", "x", folder=tmp_path)[0].dataset.weights is None


def test_axolotls_datasets_of_two_formats_are_detected_by_their_columns():
    text = "base_model: x/y\nadapter: lora\nlearning_rate: 1e-4\ndatasets: [{path: a.jsonl, type: alpaca}, "
    dataset = convert_text(f"{text}{{path: b.jsonl, type: completion}}]", "x.yml")[0].dataset
    assert (dataset.path, dataset.format) == (["a.jsonl", "b.jsonl"], "auto")
    with pytest.raises(RecipeError, match="different columns"):
        convert_text(f"{text}{{path: b.jsonl, type: completion, field: body}}]", "x.yml")


def test_a_recipe_with_other_tools_keys_stays_a_recipe():
    text = "base_model: x/y\ndataset: d.jsonl\nlora_target: all\nbf16: true\noptim: adamw_bnb_8bit\nreport_to: none\n"
    text += "lora_rank:\nseed:\n"
    recipe = parse_recipe(text)
    assert (recipe.target_modules, recipe.dtype, recipe.optim, recipe.report_to) == ("all-linear", "bfloat16", "adamw_8bit", [])
    assert (recipe.lora_r, recipe.seed) == ("auto", 42)
    assert parse_recipe("model: x\ndataset: {path: d, split: }\ndtype: bf16\nlora_target: q_proj,v_proj").target_modules == [
        "q_proj",
        "v_proj",
    ]


@pytest.mark.parametrize(
    ("key", "hint"),
    [
        ("val_size", "dataset.test_split_size"), ("max_samples", "dataset.max_rows"), ("deepspeed", "launch.strategy"),
        ("logging_steps", "every step is logged"), ("lorar", "did you mean 'lora_r'"), ("bananas", "lists the settings"),
    ],
)  # fmt: skip
def test_hints_are_right_or_absent(key, hint):
    with pytest.raises(RecipeError) as error:
        parse_recipe(f"model: x\ndataset: d\n{key}: 1\n")
    assert hint in error.value.problems[0]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ((HERE / "lf_least.yaml").read_text(), "LLaMA-Factory"), ((HERE / "trl_sft.yaml").read_text(), "TRL"),
        ("tokenizer: {_component_: torchtune.models.x}\n", "torchtune, which finetune does not read"),
        ("model: x/y\ntuner_type: lora\n", "ms-swift, which finetune does not read"),
    ],
)  # fmt: skip
def test_another_tools_file_is_no_recipe(text, message):
    with pytest.raises(RecipeError, match=message) as error:
        parse_recipe(text)
    assert len(error.value.problems) == 1


@pytest.mark.parametrize("tool", TOOLS, ids=lambda tool: tool.name)
def test_no_key_of_a_table_is_lost(tool):
    from finetune.recipe.foreign import convert

    for key in (key for key in tool.keys if not key.endswith("*")):
        values: dict = {}
        inner = values
        for part in key.split(".")[:-1]:
            inner = inner.setdefault(part, {})
        inner[key.rpartition(".")[2]] = 1
        conversion = convert(tool, values, {}, "x", Path(), {}, set())
        assert key in {entry.key for entry in conversion.entries}


def test_values_of_the_wrong_kind_are_refused_without_a_traceback():
    text = (HERE / "axolotl_lora_1b.yml").read_text()
    for old, new in (("learning_rate: 0.0002", "learning_rate: fast"), ("micro_batch_size: 2", "micro_batch_size: [2]")):
        with pytest.raises(RecipeError, match="value"):
            convert_text(text.replace(old, new), "x.yml")
