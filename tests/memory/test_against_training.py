"""On the CPU: the dry run against the same step on real tensors, and against TRL's trainer itself."""

from contextlib import nullcontext

import pytest
import torch
from tiny_models import config_values, settings

from finetune.compat.trl import narrow_tiles
from finetune.memory.simulate import Batch, simulate
from finetune.memory.tracker import StorageTracker
from finetune.model.adapters import attach_adapters, prepare_for_training
from finetune.model.build import build_base
from finetune.model.techniques import apply_techniques, step_context, training_arguments
from finetune.model.transformers_config import config_from, load_config

TOKENS = 128
ON_CPU = {"dtype": "float32", "optim": "adamw_torch", "gradient_accumulation_steps": 2}


@pytest.mark.parametrize("checkpointing", [True, pytest.param(False, marks=pytest.mark.slow)])
def test_fake_and_real_tensors_have_the_same_peaks(monkeypatch, checkpointing):
    recipe = settings(**ON_CPU, load_in_4bit=False, activation_checkpointing=checkpointing)
    config = config_from(config_values(num_hidden_layers=2), recipe)
    batch = Batch(rows=1, tokens=TOKENS, trained_tokens=TOKENS - 1, eval_rows=1)
    without_data = simulate(config, recipe, batch, None)
    monkeypatch.setattr("finetune.memory.fake_tensors.fake_tensor_mode", nullcontext)
    with_data = simulate(config, recipe, batch, None)
    assert without_data.peaks == with_data.peaks


def trained(recipe, folder):
    """Peak bytes of three optimizer steps of TRL's trainer on the CPU, above what is live after loading."""
    from datasets import Dataset
    from tokenizers import Tokenizer, models
    from transformers import PreTrainedTokenizerFast
    from trl import SFTConfig, SFTTrainer

    class Trainer(SFTTrainer):
        def training_step(self, *arguments):
            with step_context(recipe, "cpu"):
                return super().training_step(*arguments)

    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=Tokenizer(models.WordLevel({"a": 0, "b": 1}, unk_token="a")), pad_token="b", eos_token="a"
    )
    rows = [{"input_ids": list(range(3, 3 + TOKENS)), "labels": list(range(3, 3 + TOKENS))}] * 6
    arguments = SFTConfig(
        output_dir=str(folder / "out"), dataset_kwargs={"skip_prepare_dataset": True}, max_length=None, max_steps=3,
        per_device_train_batch_size=1, gradient_accumulation_steps=2, logging_strategy="no", save_strategy="no", report_to=[],
        use_cpu=True, bf16=False, disable_tqdm=True, **training_arguments(recipe),
    )  # fmt: skip
    tracker = StorageTracker()
    with tracker:
        model = attach_adapters(build_base(recipe, load_config(recipe), device="cpu", weights=True), recipe)
    apply_techniques(model, recipe)
    trainer = Trainer(model=model, args=arguments, train_dataset=Dataset.from_list(rows), processing_class=tokenizer)
    prepare_for_training(trainer.model, recipe)
    for tensor in (*model.parameters(), *model.buffers()):
        tracker.track(tensor)  # those read from a file are not made by an operator
    loaded, tracker.phase = tracker.live_bytes, "train"
    with tracker, narrow_tiles(trainer.model.config, on_cpu=True):
        trainer.train()
    return tracker.peaks[("train", None)].total_bytes - loaded


@pytest.mark.slow
@pytest.mark.parametrize("more", [{}, {"activation_checkpointing": False}, {"load_in_4bit": False}], ids=str)
def test_the_trainers_peak_is_the_dry_runs(tmp_path, more):
    from transformers import AutoModelForCausalLM

    recipe = settings(**ON_CPU, **more)
    config = config_from(config_values(num_hidden_layers=3), recipe)
    AutoModelForCausalLM.from_config(config, dtype=torch.float32).save_pretrained(tmp_path)
    run = simulate(config, recipe, Batch(rows=1, tokens=TOKENS, trained_tokens=TOKENS - 1), None)
    by_tag = run.peaks[("save", None)].by_tag
    loaded = sum(size for (part, _), size in by_tag.items() if part in ("weights", "adapters"))
    forecast = max(peak.total_bytes for (phase, _), peak in run.peaks.items() if phase not in ("load", "eval"))
    measured = trained(settings(**ON_CPU, **more, model_name_or_path=str(tmp_path)), tmp_path)
    assert forecast - loaded == pytest.approx(measured, rel=0.005)
