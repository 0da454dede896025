"""A recipe's settings as fields of TRL's SFTConfig."""

from __future__ import annotations

from typing import Any

from finetune.model.techniques import training_arguments
from finetune.settings import Settings
from finetune.settings.compatibility import padding_multiple
from finetune.settings.methods import METHODS


def trl_arguments(
    settings: Settings, *, output_dir: str, total_steps: int | None, evaluates: bool, on_cpu: bool
) -> dict[str, Any]:
    """Return fields of SFTConfig, with TRL's silent truncation, dropping of rows and NaN filter switched off."""
    warmup_steps = settings.warmup_steps
    return dict(
        output_dir=output_dir,
        dataset_kwargs={"skip_prepare_dataset": True},  # examples come tokenised, with labels, none over max_length
        max_length=None,
        packing=False,  # packed already by finetune/data/splits.py, which checks that nothing is lost
        padding_free=settings.packing,
        pad_to_multiple_of=padding_multiple(settings, settings.per_device_train_batch_size),
        per_device_train_batch_size=settings.per_device_train_batch_size,
        per_device_eval_batch_size=settings.per_device_eval_batch_size,
        gradient_accumulation_steps=settings.gradient_accumulation_steps,
        num_train_epochs=settings.num_train_epochs,
        max_steps=settings.max_steps or -1,
        learning_rate=settings.learning_rate,
        lr_scheduler_type=settings.lr_scheduler_type,
        warmup_steps=round(settings.warmup_ratio * (total_steps or 0)) if warmup_steps is None else warmup_steps,
        weight_decay=settings.weight_decay,
        max_grad_norm=settings.max_grad_norm,
        seed=settings.seed,
        data_seed=settings.seed,
        bf16=settings.dtype == "bfloat16",
        fp16=settings.dtype == "float16",
        use_cpu=on_cpu,
        ddp_find_unused_parameters=False,
        save_on_each_node=settings.launch.num_machines > 1,  # each machine has its run directory
        logging_strategy="steps",
        logging_steps=1,
        logging_nan_inf_filter=False,  # the filter would replace NaN with the last finite loss
        eval_strategy="steps" if settings.eval_steps and evaluates else "no",
        eval_steps=settings.eval_steps or None,
        prediction_loss_only=True,
        save_strategy="steps" if settings.save_steps else "no",
        save_steps=settings.save_steps or 500,
        save_total_limit=None,  # see finetune.run.seal.rotate
        report_to=[],  # trackers follow the events, see finetune.run.trackers
        disable_tqdm=True,
        dataloader_num_workers=settings.dataloader_num_workers,
        dataloader_pin_memory=not on_cpu,
        accelerator_config={"non_blocking": not on_cpu},  # copy a batch while the step before it still runs
        remove_unused_columns=not METHODS[settings.method].has_own_format and settings.vision is not True,
        **training_arguments(settings),
    )
