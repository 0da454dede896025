"""Text training of multimodal checkpoints: only the language model is loaded and adapted; all else stays as it is."""

import functools
import json

import pytest
import small_models
import torch
from peft import PeftModel
from picture_models import TEXT, save_picture_model
from safetensors import safe_open
from small_models import settings as plain_settings
from transformers import AutoModelForImageTextToText, AutoTokenizer, Llama4Config

from finetune.bundled import model_path
from finetune.errors import RecipeError
from finetune.export.merge import write_merged
from finetune.model.adapters import attach_adapters, prepare_for_training, trainable_parameters
from finetune.model.techniques import apply_techniques

IDS = torch.arange(16, 64).reshape(2, 24)
settings = functools.partial(plain_settings, dtype="float32", target_modules="all-linear")


def load(recipe):
    return small_models.load(recipe).eval()


def trained(recipe, steps=3):
    """The language model with adapters after a few steps."""
    model = attach_adapters(load(recipe), recipe)
    prepare_for_training(model, recipe)
    optimizer = torch.optim.AdamW([parameter for _, parameter in trainable_parameters(model)], lr=1e-2)
    for _ in range(steps):
        model(input_ids=IDS, labels=IDS).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    return model.eval()


def tensors_of(folder):
    """Name -> bytes of each tensor in a folder's files."""
    tensors = {}
    for path in sorted(folder.glob("*.safetensors")):
        with safe_open(path, framework="pt") as file:
            tensors |= {name: file.get_tensor(name).contiguous().view(torch.uint8).numpy().tobytes() for name in file.keys()}  # noqa: SIM118
    return tensors


@pytest.fixture(params=("gemma3", "qwen3_vl"))
def checkpoint(request, tmp_path):
    """A folder of several weight files, and the whole model that was saved there."""
    folder = tmp_path / "model"
    whole = AutoModelForImageTextToText.from_pretrained(save_picture_model(request.param, folder), dtype=torch.float32).eval()
    (folder / "model.safetensors").unlink()
    whole.save_pretrained(folder, max_shard_size="100KB")
    return folder, whole


def image_features(whole):
    """What the model's vision part makes of an image."""
    generator = torch.Generator().manual_seed(1)
    if whole.config.model_type == "gemma3":
        return whole.get_image_features(pixel_values=torch.randn(1, 3, 56, 56, generator=generator)).pooler_output
    pixels = torch.randn(16, 3 * 2 * 14 * 14, generator=generator)
    return torch.cat(whole.get_image_features(pixel_values=pixels, image_grid_thw=torch.tensor([[1, 4, 4]])).pooler_output)


def test_only_the_language_model_is_loaded_and_answers_as_the_whole_one(checkpoint):
    folder, whole = checkpoint
    model = load(settings(folder))
    names = {name for name, _ in model.named_parameters()}
    assert names == {name for name, _ in whole.named_parameters() if name.startswith(("model.language_model.", "lm_head."))}
    mask = torch.ones_like(IDS)
    mask[0, :5] = 0
    with torch.no_grad():
        assert torch.equal(model(input_ids=IDS).logits, whole(input_ids=IDS).logits)
        padded = {"input_ids": IDS, "attention_mask": mask}
        assert torch.equal(model(**padded).logits, whole(**padded).logits)
        answers = [m.generate(**padded, max_new_tokens=4, do_sample=False) for m in (model, whole)]
    assert torch.equal(*answers)


def test_adapters_of_the_language_model_are_loaded_by_plain_peft_and_merging_changes_nothing_else(checkpoint, tmp_path):
    folder, whole = checkpoint
    tuned = trained(recipe := settings(folder))
    tuned.save_pretrained(tmp_path / "adapter")
    with torch.no_grad():
        wanted = tuned(input_ids=IDS).logits
    plain = PeftModel.from_pretrained(AutoModelForImageTextToText.from_pretrained(folder), tmp_path / "adapter").eval()
    adapters = [name for name, _ in plain.named_parameters() if "lora_" in name]
    assert adapters == [name for name, _ in trainable_parameters(tuned)]
    assert len(adapters) == 2 * 3 * 7 and all("language_model" in name for name in adapters)
    with torch.no_grad():
        assert torch.equal(plain(input_ids=IDS).logits, wanted)
    write_merged(recipe, tmp_path / "adapter", tmp_path / "merged", None, print)
    before, after = tensors_of(folder), tensors_of(tmp_path / "merged")
    assert list(before) == list(after)
    changed = {name for name in before if before[name] != after[name]}
    assert len(changed) == 3 * 7 and all("proj" in name for name in changed)
    others = [path for path in folder.iterdir() if path.suffix != ".safetensors" and not path.name.endswith(".index.json")]
    assert others and all((tmp_path / "merged" / path.name).read_bytes() == path.read_bytes() for path in others)
    merged = AutoModelForImageTextToText.from_pretrained(tmp_path / "merged").eval()
    with torch.no_grad():
        assert torch.equal(image_features(merged), image_features(whole))
        torch.testing.assert_close(merged(input_ids=IDS).logits, wanted, rtol=1e-4, atol=1e-5)
        assert (whole(input_ids=IDS).logits - wanted).abs().max() > 0.01


def test_training_under_checkpointing_reaches_every_adapter_and_weights_that_are_missing_are_refused(checkpoint):
    recipe = settings(checkpoint[0], activation_checkpointing=True)
    model = attach_adapters(load(recipe), recipe)
    apply_techniques(model, recipe)
    prepare_for_training(model, recipe)
    model(input_ids=IDS, labels=IDS).loss.backward()
    assert all(parameter.grad is not None for _, parameter in trainable_parameters(model))
    path = checkpoint[0] / "config.json"
    values = json.loads(path.read_text())
    values["text_config"]["num_hidden_layers"] = 5
    values["text_config"].pop("layer_types", None)
    path.write_text(json.dumps(values))
    with pytest.raises(RecipeError, match="the weights lack"):
        load(settings(checkpoint[0]))


def run_of(folder, steps):
    """A finished run of the checkpoint in `folder`/model."""
    from finetune.recipe import load_recipe
    from finetune.run.prepare import create_run, prepare
    from finetune.run.worker import Worker

    run = create_run(prepare(load_recipe("tiny-cpu", [
        f"model_name_or_path={folder / 'model'}", f"max_steps={steps}", "save_steps=2", "effective_batch_size=2", "lora_r=4",
        "per_device_train_batch_size=1", "dataset.max_rows=16", "eval_steps=0", f"output_dir={folder / 'run'}",
    ])))  # fmt: skip
    assert Worker(run).main() == 0
    return run


@pytest.mark.slow
def test_a_run_of_a_multimodal_model_evaluates_and_merges(tmp_path):
    from finetune.evaluate.answerer import Answerer
    from finetune.export.merge import merge

    save_picture_model("gemma3", tmp_path / "model")
    run = run_of(tmp_path, steps=3)
    answerer = Answerer(run)
    prompt = answerer.prompt_ids([{"role": "user", "content": "Hello"}])
    assert len(answerer.answer([prompt], max_new_tokens=4, with_special_tokens=False)) == 1
    merged = merge(run)
    assert (merged / "preprocessor_config.json").is_file()
    assert list(tensors_of(merged)) == list(tensors_of(tmp_path / "model"))


@pytest.mark.slow
def test_a_run_of_llama_4_trains_with_the_routers_auxiliary_loss(tmp_path):
    tokenizer = AutoTokenizer.from_pretrained(model_path("tiny"))
    vision = {
        "hidden_size": 32, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 2, "image_size": 28,
        "patch_size": 14, "vision_output_dim": 32, "projector_input_dim": 32, "projector_output_dim": 32,
    }  # fmt: skip
    experts = {"num_local_experts": 4, "num_experts_per_tok": 1, "intermediate_size_mlp": 128, "attention_chunk_size": 64}
    config = Llama4Config(text_config={**TEXT, **experts, "vocab_size": len(tokenizer)}, vision_config=vision)
    for part in (AutoModelForImageTextToText.from_config(config), tokenizer):
        part.save_pretrained(tmp_path / "model")
    run_of(tmp_path, steps=1)
