"""The tiny Llama under TRL's own SFTTrainer, with the techniques of a recipe."""

from pathlib import Path

import torch
from datasets import Dataset
from tiny_training import VOCABULARY, adapted, trained
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from transformers import PreTrainedTokenizerFast
from trl import SFTConfig, SFTTrainer, pack_dataset

from finetune.model.adapters import prepare_for_training
from finetune.model.techniques import apply_techniques, optimizer_class, step_context, training_arguments
from finetune.settings import Recipe


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
    trainer = TechniqueTrainer(
        model=model,
        args=args,
        train_dataset=pack_dataset(rows(), 128, "bfd") if args.packing else rows(),
        processing_class=tokenizer(),
        optimizer_cls_and_kwargs=optimizer_class(settings),
    )
    trainer.settings = settings
    prepare_for_training(trainer.model, settings)
    apply_techniques(trainer.model, settings)
    return trainer


def logged_losses(trainer: SFTTrainer) -> list[float]:
    return [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]


def adapter(trainer: SFTTrainer) -> torch.Tensor:
    return torch.cat([parameter.detach().float().flatten() for parameter in trained(trainer.model)])


def state_bytes(trainer: SFTTrainer) -> int:
    """Bytes of the optimizer's tensors for the parameters."""
    states = trainer.optimizer.optimizer.state.values()
    return sum(
        value.nbytes
        for state in states
        for name, value in state.items()
        if isinstance(value, torch.Tensor) and "qmap" not in name
    )
