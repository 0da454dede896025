"""A run on rows with pictures: resumed exactly, merged without touching the tower, refused where it was not checked."""

import io
import shutil
from pathlib import Path

import pytest
import torch
from picture_models import save_picture_model, save_picture_rows
from safetensors import safe_open
from transformers import AutoModelForImageTextToText

from finetune.errors import CommandError
from finetune.evaluate.answerer import Answerer
from finetune.export.gguf import export_gguf
from finetune.export.merge import merge
from finetune.planner.planning import encode_rows
from finetune.recipe import recipe_from
from finetune.run.prepare import create_run, prepare
from finetune.run.worker import Worker

SIZES = [(60, 40), (150, 60), (57, 57), (40, 90)]


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return save_picture_model("qwen2_5_vl", tmp_path_factory.mktemp("model") / "vl")


def recipe(model, folder, **more):
    rows = save_picture_rows(folder / "rows", SIZES)
    return recipe_from({
        "model_name_or_path": model, "dataset": {"path": rows}, "gpu": "cpu", "dtype": "float32", "load_in_4bit": False,
        "lora_r": 4, "lora_alpha": 8, "target_modules": "all-linear", "effective_batch_size": 2, "max_steps": 4,
        "save_steps": 2, "per_device_train_batch_size": 1, "learning_rate": 1e-2, "optim": "adamw_torch",
        "output_dir": str(folder / "run"), **more,
    })  # fmt: skip


def trained(recipe):
    run = create_run(prepare(recipe))
    assert Worker(run).main() == 0
    return run


def tensors(path):
    with safe_open(path, "pt") as file:
        return {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118


@pytest.mark.slow
@pytest.mark.parametrize(("train_vision", "parts"), [("none", set()), ("projector", {"merger"}), ("all", {"merger", "blocks"})])
def test_a_resumed_run_trains_the_same_adapter_and_merging_changes_only_what_was_trained(model, tmp_path, train_vision, parts):
    run = trained(recipe(model, tmp_path, train_vision=train_vision))
    whole = tensors(run.adapter / "adapter_model.safetensors")
    shutil.rmtree(run.checkpoints / "checkpoint-4")
    shutil.rmtree(run.adapter)
    assert Worker(run).main() == 0
    resumed = tensors(run.adapter / "adapter_model.safetensors")
    assert any("visual" in name for name in whole) == bool(parts)
    assert whole.keys() == resumed.keys() and all(torch.equal(whole[name], resumed[name]) for name in whole)
    batch = Worker(run)._build_trainer()[0]
    inputs = batch.data_collator([batch.train_dataset[index] for index in range(2)])
    inputs.pop("labels")
    before, after = tensors(Path(model) / "model.safetensors"), tensors(merge(run) / "model.safetensors")
    changed = {name for name in before if not torch.equal(before[name].view(torch.uint8), after[name].view(torch.uint8))}
    assert {part for part in ("merger", "blocks", "patch_embed") for name in changed if f"visual.{part}" in name} == parts
    assert any("visual" not in name for name in changed)
    merged = AutoModelForImageTextToText.from_pretrained(run.path / "merged", dtype=torch.float32).eval()
    with torch.no_grad():
        wanted, logits = (model(**inputs).logits for model in (Answerer(run).model, merged))
    assert (wanted - logits).abs().max() < 0.05  # the merged weights are in the base's 16 bit


@pytest.mark.parametrize(("setting", "value"), [
    ("packing", True), ("method", "dpo"), ("torch_compile", True), ("load_in_8bit", True), ("excess_length", "truncate"),
])  # fmt: skip
def test_what_was_not_checked_with_pictures_is_refused_by_name(model, tmp_path, setting, value):
    with pytest.raises(Exception, match="images"):
        recipe(model, tmp_path, vision=True, **{setting: value})


def test_a_gguf_file_without_the_tower_is_not_made_and_a_smaller_max_pixels_gives_fewer_tokens(model, tmp_path):
    run = create_run(prepare(recipe(model, tmp_path)))
    with pytest.raises(CommandError, match="with images; llama.cpp needs a second file"):
        export_gguf(run, llama_cpp=tmp_path)
    recipes = [recipe(model, tmp_path, max_pixels=size) for size in (None, 4096)]
    usual, scaled = (max(encode_rows(encoded).select(recipes[0], None).lengths) for encoded in recipes)
    assert scaled < usual


@pytest.mark.slow
def test_the_largest_picture_trains_in_step_two_also_where_another_row_is_longer(model, tmp_path):
    sizes = [(28, 28)] * 12 + [(112, 112)] + [(28, 28)] * 2
    settings = recipe(model, tmp_path)
    path = Path(save_picture_rows(tmp_path / "rows", sizes))
    rows = path.read_text().splitlines(keepends=True)
    longer = [rows[number].replace("Which number", "Which number " * 60) for number in (3, 5)]
    path.write_text("".join([*rows, *longer]))
    trainer = Worker(create_run(prepare(settings)))._build_trainer()[0]
    order = list(trainer._get_train_sampler())
    pictures = [row["pictures"][0]["width"] for row in trainer.train_dataset]
    lengths = [len(row["input_ids"]) for row in trainer.train_dataset]
    step = order[2:4]  # of two rows
    assert max(pictures) == 112 == max(pictures[index] for index in step)
    assert max(lengths) == max(lengths[index] for index in step) and pictures[lengths.index(max(lengths))] == 28


@pytest.mark.slow
def test_in_a_chat_a_picture_goes_with_its_message(model, tmp_path, monkeypatch, finetune):
    run = trained(recipe(model, tmp_path, max_steps=1))
    lines = [f"/image {tmp_path / 'rows' / 'rows-0.png'}", "Which\ufffc number", "Again"]
    monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO("\n".join(lines).encode())))
    code, shown = finetune("chat", run.path, "--max-new-tokens", "2")
    assert code == 0, shown
