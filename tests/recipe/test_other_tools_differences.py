"""What other tools do otherwise is refused or said: rows, masks and limits that a file of theirs implies."""

import json

import pytest
import yaml

from finetune.errors import RecipeError
from finetune.recipe.foreign import convert_text

AXOLOTL = {
    "base_model": "meta-llama/Meta-Llama-3-8B-Instruct", "adapter": "qlora", "load_in_4bit": True, "lora_r": 8,
    "lora_alpha": 16, "lora_target_linear": True, "micro_batch_size": 1, "learning_rate": 1e-4, "sequence_len": 512,
}  # fmt: skip
LLAMA_FACTORY = {
    "model_name_or_path": "Qwen/Qwen2.5-7B-Instruct", "stage": "sft", "do_train": True, "finetuning_type": "lora",
    "dataset": "d", "template": "qwen", "cutoff_len": 2048, "learning_rate": 1e-4, "output_dir": "x",
}  # fmt: skip
TRL = {
    "model_name_or_path": "Qwen/Qwen3-4B", "dataset_name": "a/b", "use_peft": True, "lora_target_modules": "all-linear",
    "learning_rate": 1e-4, "output_dir": "x",
}  # fmt: skip


def read(values, folder, overrides=()):
    return convert_text(yaml.safe_dump(values), "x.yaml", list(overrides), folder)


def axolotl(**dataset):
    return {**AXOLOTL, "datasets": [{"path": "a/b", "type": "chat_template", **dataset}]}


def write_rows(path, *rows):
    path.parent.mkdir(exist_ok=True, parents=True)
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


@pytest.mark.parametrize("key, value", [("train_on_eos", "none"), ("train_on_eos", False), ("roles_to_train", [])])
def test_axolotls_other_masks_are_refused_when_they_are_off(tmp_path, key, value):
    with pytest.raises(RecipeError, match=f"{key}.*changes what is learnt"):
        read(axolotl(**{key: value}), tmp_path)


def test_axolotls_test_rows_of_another_split_are_not_read_as_the_training_rows_are(tmp_path):
    values = axolotl() | {"test_datasets": [{"path": "c/d", "type": "chat_template", "split": "test"}]}
    with pytest.raises(RecipeError, match="split and columns of the training rows"):
        read(values, tmp_path)


def test_the_notes_of_all_of_axolotls_datasets_are_printed(tmp_path):
    values = axolotl()
    values["datasets"].append({"path": "c/d", "type": "alpaca"})
    assert any("### Instruction:" in note for note in read(values, tmp_path)[1].notes)


def test_axolotls_earlier_sharegpt_is_read_where_its_template_is_the_models_own(tmp_path):
    read_file = read(axolotl(type="sharegpt", conversation="llama3"), tmp_path)
    assert read_file[0].dataset.format == "sharegpt" and any(
        "earlier Axolotl" in note for note in read_file[1].notes
    )
    with pytest.raises(RecipeError, match="chatml"):
        read(axolotl(type="sharegpt", conversation="chatml"), tmp_path)


@pytest.mark.parametrize("values", [{"do_train": False}, {"do_train": False, "do_predict": True}])
def test_a_file_that_does_not_train_is_refused(tmp_path, values):
    with pytest.raises(RecipeError, match="does not train"):
        read({**LLAMA_FACTORY, **values}, tmp_path, ["dataset.path=d.jsonl"])
    with pytest.raises(RecipeError, match="does not train"):
        read({"model_name_or_path": "a/b", "template": "qwen", "infer_backend": "huggingface"}, tmp_path)


@pytest.mark.parametrize(
    "model, template, more, phrase",
    [
        ("Qwen/Qwen3-8B", "qwen3", {}, "every answer without a thought gets one"),
        ("Qwen/Qwen3-8B", "qwen3", {"enable_thinking": False}, "thoughts are removed"),
        ("Qwen/Qwen3-8B", "qwen3_nothink", {}, "there it writes none"),
        ("Qwen/Qwen3-4B-Instruct-2507", "qwen3_nothink", {}, ""),
        ("Qwen/Qwen2.5-7B-Instruct", "qwen", {"enable_thinking": False}, ""),
    ],
)
def test_where_llama_factory_writes_thoughts_otherwise_is_said(tmp_path, model, template, more, phrase):
    values = {**LLAMA_FACTORY, **more, "model_name_or_path": model, "template": template}
    notes = [note for note in read(values, tmp_path, ["dataset.path=d.jsonl"])[1].notes if "thought" in note]
    assert (phrase in notes[0]) if phrase else not notes


def test_how_llama_factory_shortens_a_long_row_is_said(tmp_path):
    assert any("in proportion" in note for note in read(LLAMA_FACTORY, tmp_path, ["dataset.path=d"])[1].notes)


@pytest.mark.parametrize(
    "columns, ignored",
    [
        (None, ["history", "system"]),
        ({"prompt": "instruction", "response": "output"}, ["history", "input", "system"]),
        ({"prompt": "instruction", "query": "input", "response": "output", "system": "system"}, ["history"]),
    ],
)
def test_columns_that_llama_factory_does_not_read_are_left_out(tmp_path, columns, ignored):
    write_rows(tmp_path / "d.jsonl", {"instruction": "i", "input": "x", "output": "o", "system": "s", "history": []})
    entry = {"file_name": "d.jsonl"} | ({"columns": columns} if columns else {})
    (tmp_path / "dataset_info.json").write_text(json.dumps({"d": entry}))
    assert read({**LLAMA_FACTORY, "dataset_dir": str(tmp_path)}, tmp_path)[0].dataset.ignore_columns == ignored


def test_trl_without_a_limit_cuts_no_answer(tmp_path):
    read_file = read({**TRL, "max_length": None}, tmp_path)
    assert read_file[0].excess_length == "raise" and read_file[0].max_length == "auto"
    assert any("no row is cut" in note for note in read_file[1].notes)
    assert read(TRL, tmp_path)[0].max_length == 1024


def test_trls_former_name_of_its_loss_and_its_own_tokenizer_are_accepted(tmp_path):
    values = {**TRL, "loss_type": "chunked_nll", "tokenizer_name_or_path": TRL["model_name_or_path"]}
    assert read(values, tmp_path)[1].tool == "TRL"
    with pytest.raises(RecipeError, match="the model's own tokenizer"):
        read({**values, "tokenizer_name_or_path": "c/d"}, tmp_path)


