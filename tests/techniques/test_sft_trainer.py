"""Each technique under TRL's SFTTrainer: not undone, not applied twice, and with the loss of the plain run."""

import functools
import tempfile
from pathlib import Path

import pytest
import torch
from datasets import Dataset
from tiny_training import BASES, RECOMPUTED, VOCABULARY, adapted, settings_for, trained
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from transformers import PreTrainedTokenizerFast
from trl import SFTConfig, SFTTrainer, pack_dataset

from finetune.layers.checkpointing import decoder_layers
from finetune.model.adapters import prepare_for_training
from finetune.model.techniques import CpuAdamW, apply_techniques, optimizer_class, step_context, training_arguments
from finetune.settings import Recipe
from finetune.settings.optimizers import OPTIMIZERS

pytestmark = pytest.mark.slow

EXACT = {**RECOMPUTED, "cpu-adamw": {"optim": "adamw_cpu_offload"}}
CLOSE = {
    "adamw-8bit": ({"optim": "adamw_8bit"}, 1e-2),
    "paged-8bit": ({"optim": "paged_adamw_8bit"}, 1e-2),
    "paged-32bit": ({"optim": "paged_adamw_32bit"}, 1e-4),
    "adafactor": ({"optim": "adafactor"}, 5e-2),
}


class TechniqueTrainer(SFTTrainer):
    """SFTTrainer with the saved-activation hooks around each micro-batch."""

    settings: Recipe

    def training_step(self, *arguments, **named):
        with step_context(self.settings, "cpu"):
            return super().training_step(*arguments, **named)


def tokenizer() -> PreTrainedTokenizerFast:
    vocab = {f"w{index}": index for index in range(VOCABULARY - 2)} | {"<pad>": VOCABULARY - 2, "<eos>": VOCABULARY - 1}
    return PreTrainedTokenizerFast(tokenizer_object=Tokenizer(WordLevel(vocab, "w0")), pad_token="<pad>", eos_token="<eos>")


def rows(count: int = 16) -> Dataset:
    generator = torch.Generator().manual_seed(5)
    ids = [torch.randint(0, 64, (20 + index % 5,), generator=generator).repeat_interleave(2).tolist() for index in range(count)]
    return Dataset.from_dict({"input_ids": ids, "labels": ids})


def make_trainer(folder: Path, settings: Recipe, steps: int = 6, **arguments) -> TechniqueTrainer:
    """Batch 2 x 2 accumulation, clipping, decay and a falling rate. TRL makes the trainer, so TRL's own traps are in it."""
    model = adapted(settings)
    args = SFTConfig(
        output_dir=str(folder), max_steps=steps, per_device_train_batch_size=2, gradient_accumulation_steps=2,
        learning_rate=settings.learning_rate, weight_decay=0.01, lr_scheduler_type="cosine", max_grad_norm=1.0, logging_steps=1,
        bf16=settings.dtype == "bfloat16", use_cpu=True, report_to=[], disable_tqdm=True, dataloader_pin_memory=False,
        dataset_kwargs={"skip_prepare_dataset": True}, seed=7,
        **{"max_length": None} | training_arguments(settings) | arguments,
    )  # fmt: skip
    dataset = pack_dataset(rows(), 128, "bfd") if args.packing else rows()
    trainer = TechniqueTrainer(
        model=model, args=args, train_dataset=dataset, processing_class=tokenizer(),
        optimizer_cls_and_kwargs=optimizer_class(settings),
    )  # fmt: skip
    trainer.settings = settings
    prepare_for_training(trainer.model, settings)
    apply_techniques(trainer.model, settings)
    return trainer


def logged_losses(trainer: SFTTrainer) -> list[float]:
    return [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]


def adapter(trainer: SFTTrainer) -> torch.Tensor:
    return torch.cat([parameter.detach().float().flatten() for parameter in trained(trainer.model)])


@functools.cache
def run(base, kind, **changes):
    """The trainer after its run; each is made once."""
    with tempfile.TemporaryDirectory() as folder:
        trainer = make_trainer(Path(folder), settings_for(base, lora_r=64, **BASES[kind], **changes), save_strategy="no")
        trainer.train()
    return trainer


@pytest.mark.parametrize("name", EXACT)
def test_losses_and_adapter_are_those_of_the_plain_run_to_the_bit(base, name):
    trainer, plain = run(base, "nf4", **EXACT[name]), run(base, "nf4")
    assert logged_losses(trainer) == logged_losses(plain)
    assert torch.equal(adapter(trainer), adapter(plain))


@pytest.mark.parametrize("name", CLOSE)
def test_losses_stay_close_to_the_plain_run(base, name):
    changes, tolerance = CLOSE[name]
    seen = logged_losses(run(base, "lora", **changes))
    assert seen == pytest.approx(logged_losses(run(base, "lora")), rel=tolerance)
    assert seen[-1] < seen[0]


def test_trl_does_not_undo_what_was_applied(base):
    every_2, none = run(base, "nf4", **EXACT["every-2"]), run(base, "lora")
    assert [layer.gradient_checkpointing for layer in decoder_layers(every_2.model)] == [True, False, True, False]
    # TRL's own default is to recompute all
    assert not any(layer.gradient_checkpointing for layer in decoder_layers(none.model))


def test_every_optimizer_of_a_recipe_is_one_that_the_trainer_makes(base):
    expected = {
        "adamw_torch_fused": "AdamW", "adamw_torch": "AdamW", "adamw_8bit": "AdamW", "paged_adamw_8bit": "AdamW",
        "paged_adamw_32bit": "AdamW", "adafactor": "Adafactor", "adamw_cpu_offload": "CpuAdamW", "lion_8bit": "Lion",
    }  # fmt: skip
    assert expected.keys() == OPTIMIZERS.keys()
    for name, class_name in expected.items():
        trainer = make_trainer(Path(tempfile.gettempdir()) / "unused", settings_for(base, optim=name))
        assert type(trainer.create_optimizer()).__name__ == class_name
    assert training_arguments(settings_for(base, optim="adafactor"))["optim"] == "adafactor"


def test_resuming_the_host_optimizer_is_the_same_to_the_bit(base, tmp_path):
    settings = settings_for(base, lora_r=16, optim="adamw_cpu_offload", **BASES["nf4"])
    whole = make_trainer(tmp_path / "whole", settings, save_strategy="steps", save_steps=3)
    whole.train()
    resumed = make_trainer(tmp_path / "resumed", settings, save_strategy="no")
    resumed.train(resume_from_checkpoint=str(tmp_path / "whole" / "checkpoint-3"))
    assert type(resumed.optimizer.optimizer) is CpuAdamW
    assert logged_losses(resumed)[-3:] == logged_losses(whole)[-3:]
    assert torch.equal(adapter(resumed), adapter(whole))
    pairs = zip(resumed.optimizer.optimizer.state.values(), whole.optimizer.optimizer.state.values(), strict=True)
    assert all(torch.equal(ours[name], theirs[name]) for ours, theirs in pairs for name in theirs)


def test_packed_rows_through_varlen_attention_have_the_losses_of_sdpa(base):
    def packed(attention):
        settings = settings_for(base, attn_implementation=attention)
        with tempfile.TemporaryDirectory() as folder:
            trainer = make_trainer(Path(folder), settings, save_strategy="no", packing=True, max_length=128)
            batch = next(iter(trainer.get_train_dataloader()))
            trainer.train()
        assert (batch["position_ids"] == 0).sum() > len(batch["input_ids"])  # several rows in one sequence
        return logged_losses(trainer)

    assert packed("torch_varlen") == pytest.approx(packed("sdpa"), rel=1e-5)
