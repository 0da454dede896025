"""`finetune convert`: a recipe with the other tool's numbers, and a line for each key that is not in it."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest
import yaml

from finetune.cli import main
from finetune.errors import RecipeError
from finetune.recipe import parse_recipe, write_recipe
from finetune.recipe.foreign import convert_file, convert_text, tools
from finetune.settings.schema import DatasetRecipe, Recipe

HERE = Path(__file__).parent / "foreign"
#: The least that each tool trains from, and how it asks for a method.
LEAST = {
    "LLaMA-Factory": {"model_name_or_path": "x/y", "finetuning_type": "lora", "dataset": "rows"},
    "Axolotl": {"base_model": "x/y", "adapter": "lora", "learning_rate": 1e-4, "datasets": [{"path": "x/z"}]},
    "TRL": {"model_name_or_path": "x/y", "use_peft": True, "dataset_name": "x/z"},
}
SPECIAL = ("else", "fraction")
METHOD_KEYS = {"LLaMA-Factory": "stage", "Axolotl": "rl"}
by_tool = pytest.mark.parametrize("tool", tools(), ids=lambda tool: tool.name)


def convert(values: dict, *overrides: str):
    return convert_text(yaml.safe_dump(values), "x.yaml", overrides)


def reports(values: dict) -> dict:
    return {key: (report.outcome, report.text) for key, report in convert(values)[1].keys.items()}


def refusals(text: str, *overrides: str) -> str:
    with pytest.raises(RecipeError) as error:
        convert_text(text, "x.yaml", overrides)
    return "\n".join(error.value.problems)


@pytest.mark.parametrize("name", ["llama-factory", "axolotl", "trl"])
def test_the_recipe_and_the_list_are_the_golden_ones_and_the_tools_file_is_no_recipe(name, monkeypatch, capsys):
    monkeypatch.chdir(HERE)
    monkeypatch.setattr("sys.argv", ["finetune", "convert", f"{name}.yaml"])
    assert main() == 0
    captured = capsys.readouterr()
    assert f"{captured.out}\n{captured.err}" == (HERE / f"{name}.txt").read_text()
    recipe = convert_file(f"{name}.yaml")[0]
    assert parse_recipe(captured.out) == parse_recipe(write_recipe(recipe)) == recipe
    with pytest.raises(RecipeError, match="unknown setting") as error:
        parse_recipe((HERE / f"{name}.yaml").read_text(), f"{name}.yaml")
    assert "finetune convert FILE" in error.value.fix


# -- the tables


@by_tool
def test_tables_name_settings_and_keys_that_exist(tool):
    rows = [row if isinstance(row, dict) else {"else": row} for row in tool.keys.values()]
    settings = {name for row in rows for value, name in row.items() if value in SPECIAL and name}
    settings |= {name for row in rows for inner in row.values() if isinstance(inner, dict) for name in inner}
    for name in settings:
        section, _, inner = name.partition(".")
        assert section in Recipe.model_fields and (not inner or inner.split(".")[0] in DatasetRecipe.model_fields), name
    methods = tool.table["methods"].values()
    named = {*tool.table["batch"], *tool.defaults, *tool.table["markers"].split(), *tool.table.get("notes on defaults", {})}
    named |= {key for row in methods for key in (*row.get("defaults", {}), *row.get("keys", "").split())}
    assert not {key for key in named if not tool.knows(key)}
    assert tool.table["version"]


@by_tool
def test_every_value_of_a_table_makes_a_valid_recipe_and_every_key_is_listed_with_a_reason(tool):
    for key, row in tool.keys.items():
        for value in [value for value in row if value not in SPECIAL] if isinstance(row, dict) else []:
            needs = {"load_in_4bit": True} if value == "qlora" else {}
            needs |= {"label_smoothing": 0.1} if value == "robust" else {"rl": "dpo"} if key.startswith("dpo") else {}
            name, _, inner = key.partition(".")
            convert(LEAST[tool.name] | needs | {name: [{inner: value}] if inner else value}, "effective_batch_size=8")
    for key in {*tool.keys, *tool.reasons, "bananas"}:
        name, _, inner = key.partition(".")
        values = LEAST[tool.name] | {name: [{inner: [7]}] if inner else [7]}
        try:
            report = convert(values)[1].keys[key]
        except RecipeError as error:  # not a value of this key
            assert key in str(error) or "x.yaml:" in str(error), key
        else:
            assert report.text, key


@by_tool
@pytest.mark.parametrize("method", ["sft", "dpo", "kto"])
def test_an_absent_key_is_the_tools_own_default(tool, method):
    chosen = {METHOD_KEYS[tool.name]: method} if tool.name in METHOD_KEYS else {}
    overrides = ["effective_batch_size=8", *([] if chosen else [f"method={method}"])]
    least = LEAST[tool.name] | chosen
    own = tool.table["methods"][method].get("defaults", {})
    defaults = {key: value for key, value in (tool.defaults | own).items() if not isinstance(value, dict) and key not in least}
    assert convert(least, *overrides)[0] == convert(least | defaults, *overrides)[0]


def test_defaults_of_trl_are_those_of_its_classes():
    from trl import DPOConfig, KTOConfig, ModelConfig, SFTConfig

    tool = tools()[-1]
    for method, config in {"sft": SFTConfig, "dpo": DPOConfig, "kto": KTOConfig}.items():
        fields = {field.name: field.default for kind in (ModelConfig, config) for field in dataclasses.fields(kind)}
        for key, value in (tool.defaults | tool.table["methods"][method]["defaults"]).items():
            if (
                key in fields
                and fields[key] is not dataclasses.MISSING
                and key not in ("lora_target_modules", "dtype", "warmup_ratio")
            ):
                assert fields[key] == value, key


@pytest.mark.parametrize(
    ("tool", "expected"),
    [
        ("LLaMA-Factory", {"effective_batch_size": 8, "learning_rate": 5e-5, "num_train_epochs": 3, "max_length": 2048,
                           "lora_r": 8, "lora_alpha": 16, "lr_scheduler_type": "linear", "warmup_ratio": 0,
                           "target_modules": "all-linear"}),
        ("Axolotl", {"effective_batch_size": 1, "num_train_epochs": 1, "max_length": 512, "lr_scheduler_type": "cosine",
                     "warmup_ratio": 0.03, "excess_length": "drop", "target_modules": ["q_proj", "v_proj"]}),
        ("TRL", {"effective_batch_size": 8, "learning_rate": 2e-5, "num_train_epochs": 3, "max_length": 1024, "lora_r": 16,
                 "lora_alpha": 32, "lr_scheduler_type": "linear", "warmup_ratio": 0, "lora_dropout": 0.05,
                 "train_on_inputs": True}),
    ],
)  # fmt: skip
def test_numbers_of_a_file_without_numbers(tool, expected):
    recipe = convert(LEAST[tool])[0]
    assert {name: getattr(recipe, name) for name in expected} == expected


# -- nothing is lost


def test_keys_that_may_change_the_result_are_listed_with_what_to_type_and_of_datasets_one_is_carried_over():
    dropped = reports(LEAST["LLaMA-Factory"] | {"template": "qwen", "neftune_noise_alpha": 5, "what": 1, "pissa_init": False})
    assert dropped["dataset"][0] == dropped["template"][0] == dropped["neftune_noise_alpha"][0] == "not carried over"
    assert "dataset.path=" in dropped["dataset"][1] and dropped["what"][1] == "finetune does not know this key"
    assert dropped["pissa_init"] == ("no effect", "is off or empty")
    single = LEAST["Axolotl"] | {"datasets": [{"path": "x/z", "split": "train", "type": "alpaca"}]}
    assert convert(single)[0].dataset.path == "x/z" and reports(single)["datasets.type"][0] == "not carried over"
    recipe, read = convert(LEAST["Axolotl"] | {"datasets": [{"path": "x/z"}, {"path": "x/y"}]})
    assert recipe.dataset.path == "none" and "dataset.path='[A, B]'" in read.keys["datasets"].text
    files = LEAST["Axolotl"] | {"datasets": [{"path": "json", "data_files": "rows.jsonl"}]}
    assert convert(files)[0].dataset.path == "none" and reports(files)["datasets.path"][0] == "not carried over"


def test_of_two_keys_for_one_setting_the_other_is_listed_no_limit_stays_none_and_warmup_is_steps_or_a_share():
    values = LEAST["Axolotl"] | {"lora_target_linear": True, "lora_target_modules": ["q_proj", "k_proj"]}
    assert convert(values)[0].target_modules == "all-linear"
    assert reports(values)["lora_target_modules"] == ("not carried over", "lora_target_linear takes precedence")
    recipe = convert(LEAST["TRL"] | {"max_length": None})[0]
    assert (recipe.max_length, recipe.excess_length) == ("auto", "raise")
    for value, expected in ((0, (None, 0.0)), (0.1, (None, 0.1)), (20, (20, 0.03))):
        recipe = convert(LEAST["TRL"] | {"warmup_steps": value})[0]
        assert (recipe.warmup_steps, recipe.warmup_ratio) == expected
    for none in ({"warmup_steps": 0}, {"warmup_ratio": 0}):
        assert convert(LEAST["Axolotl"] | none)[0].warmup_ratio == 0
    listed = reports(LEAST["TRL"] | {"eval_steps": 0.1, "save_steps": 50})
    assert (listed["eval_steps"][0], listed["save_steps"][0]) == ("not carried over", "carried over")


# -- methods


@pytest.mark.parametrize(
    ("values", "expected"),
    [
        ({"loss_type": ["ipo"]}, ("dpo", 0.1, "ipo", 1e-6, 0.0)), ({"beta": 0.2}, ("dpo", 0.2, "sigmoid", 1e-6, 0.0)),
        ({"desirable_weight": 2.0, "learning_rate": 5e-6}, ("kto", 0.1, None, 5e-6, 0.0)),
        ({}, ("sft", None, None, 2e-5, 0.05)),
    ],
)  # fmt: skip
def test_a_trl_file_is_read_by_its_keys_and_says_so(values, expected):
    recipe, read = convert(LEAST["TRL"] | values)
    assert (recipe.method, recipe.beta, recipe.loss_type, recipe.learning_rate, recipe.lora_dropout) == expected
    assert any(f"`trl {recipe.method}`" in note for note in read.notes)


def test_dropout_is_off_in_dpo_and_that_is_listed():
    values = LEAST["LLaMA-Factory"] | {"stage": "dpo", "lora_dropout": 0.1, "pref_loss": "hinge"}
    recipe = convert(values)[0]
    assert (recipe.method, recipe.loss_type, recipe.lora_dropout) == ("dpo", "hinge", 0.0)
    assert reports(values)["lora_dropout"] == ("not carried over", "LLaMA-Factory has lora_dropout 0.0 in dpo")
    assert reports(LEAST["LLaMA-Factory"] | {"pref_beta": 0.1})["pref_beta"] == ("no effect", "method sft has no beta")


# -- refusals


@pytest.mark.parametrize(
    ("tool", "values", "reason"),
    [
        ("LLaMA-Factory", {"finetuning_type": "full"}, "x.yaml:2: finetuning_type full: finetune trains LoRA"),
        ("LLaMA-Factory", {"stage": "ppo"}, "stage ppo: only sft, dpo and kto are"),
        ("LLaMA-Factory", {"quantization_bit": 3}, "4 or 8 bits"), ("LLaMA-Factory", {"do_train": False}, "does not train"),
        ("LLaMA-Factory", {"output_dir": "saves/${stage}"}, "write the value out"),
        ("LLaMA-Factory", {"lr_scheduler_type": "polynomial"}, "x.yaml:4: lr_scheduler_type is 'polynomial'"),
        ("LLaMA-Factory", {"gradient_accumulation_steps": [2]}, "not a whole number"),
        ("Axolotl", {"adapter": None}, "all parameters are trained"), ("Axolotl", {"rl": "grpo"}, "rl grpo"),
        ("Axolotl", {"batch_size": 8}, "write micro_batch_size"),
        ("Axolotl", {"learning_rate": "fast"}, "learning_rate is 'fast'"),
        ("Axolotl", {"hub_token": "abc"}, "secrets don't belong"),
        ("TRL", {"use_peft": None}, "use_peft is not set"),
        ("TRL", {"num_generations": 8}, "num_generations 8: only sft, dpo and kto are"),
        ("TRL", {"loss_type": "dft"}, "loss_type dft"),
    ],
)  # fmt: skip
def test_what_finetune_does_not_train_is_refused(tool, values, reason):
    problems = refusals(yaml.safe_dump(LEAST[tool] | values, sort_keys=False))
    assert reason in problems and "abc" not in problems and len(problems.splitlines()) == 1


def test_qlora_is_in_4_bits_overrides_replace_settings_and_processes_multiply_the_batch():
    for more in ({}, {"load_in_4bit": True}):
        assert convert(LEAST["Axolotl"] | {"adapter": "qlora"} | more)[0].load_in_4bit is True
    recipe = convert(LEAST["LLaMA-Factory"], "dataset.path=mine.jsonl", "lora_r=64", "launch.num_processes=4")[0]
    assert (recipe.dataset.path, recipe.lora_r, recipe.effective_batch_size) == ("mine.jsonl", 64, 8 * 4)
    for override in ("launch=ddp", "method=[a]"):
        with pytest.raises(RecipeError, match=override.partition("=")[0]):
            convert(LEAST["LLaMA-Factory"], override)


def test_a_recipe_with_other_tools_keys_stays_a_recipe():
    text = "base_model: x/y\ndataset: d.jsonl\nlora_target: all\nbf16: true\noptim: adamw_bnb_8bit\nreport_to: none\n"
    recipe = parse_recipe(f"{text}lora_rank:\nseed:\n")
    assert (recipe.target_modules, recipe.dtype, recipe.optim, recipe.report_to) == ("all-linear", "bfloat16", "adamw_8bit", [])
    assert (recipe.lora_r, recipe.seed) == ("auto", 42)
    with pytest.raises(RecipeError, match="is not a configuration of"):
        convert_text(text, "x.yaml")


def test_hints_are_right_or_absent_and_a_token_of_the_vocabulary_is_no_secret():
    hints = {"lorar": "did you mean 'lora_r'", "bananas": "lists the settings", "project_name": "lists the settings"}
    for key, hint in hints.items():
        with pytest.raises(RecipeError) as error:
            parse_recipe(f"model: x\ndataset: d\n{key}: 1\n")
        assert hint in error.value.problems[0]
    for key in ("pad_token", "tokenizer_pad_token", "eos_token"):
        with pytest.raises(RecipeError) as error:
            parse_recipe(f'model: x\ndataset: d\n{key}: "<|endoftext|>"\n')
        assert "secret" not in str(error.value) and key in str(error.value)
    with pytest.raises(RecipeError, match="secrets don't belong"):
        parse_recipe("model: x\ndataset: d\nhub_token: 12345\n")


# -- YAML 1.1 in their files


def test_other_tools_files_are_read_as_yaml_1_1_with_anchors_and_recipes_stay_strict():
    text = yaml.safe_dump(LEAST["Axolotl"]) + "sequence_len: 8_192\nsample_packing: yes\ntrain_on_inputs: off\nseed: 0x10\n"
    recipe = convert_text(f"{text}weight_decay: 1e-2\n", "x.yml")[0]
    assert (recipe.max_length, recipe.packing, recipe.train_on_inputs, recipe.seed) == (8192, True, False, 16)
    assert recipe.weight_decay == 0.01
    for line in ("max_length: 8_192", "packing: yes", "seed: 010"):
        with pytest.raises(RecipeError):
            parse_recipe(f"model: x\ndataset: d\n{line}\n")
    text = "base: &base {path: x/z}\nbase_model: x/y\nadapter: lora\nlearning_rate: 1e-4\ndatasets: [{<<: *base, split: a}]\n"
    dataset = convert_text(text, "x.yml")[0].dataset
    assert (dataset.path, dataset.split) == ("x/z", "a")
    with pytest.raises(RecipeError, match="aliases"):
        parse_recipe("model: &m x\ndataset: d\nchat_template: *m\n")


@pytest.mark.parametrize("bomb", ["a: &a [*a]", "a: &a [1, 1]\n" + "".join(
    f"{new}: &{new} [{', '.join([f'*{old}'] * 9)}]\n" for old, new in zip("abcdefgh", "bcdefghi", strict=True)
)])  # fmt: skip
def test_aliases_that_grow_without_end_are_refused(bomb):
    assert "nested too deep or too long" in refusals(f"adapter: lora\n{bomb}")
