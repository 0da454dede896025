"""`plan`: a run's settings for a GPU, each with its reason, and the forecast."""

from __future__ import annotations

from dataclasses import fields
from pathlib import Path
from typing import TYPE_CHECKING, Any

from finetune.card import find_card
from finetune.errors import NoCard, RecipeError
from finetune.planner import plan as plans
from finetune.planner.planning import plan_recipe, read_rows, without_rows
from finetune.recipe.load import NO_DATASET, recipe_from
from finetune.settings.methods import METHODS

if TYPE_CHECKING:
    from datasets import Dataset

    from finetune.data.preparation import SelectedRows
    from finetune.settings import Settings

#: Settings that need the trainer of `finetune run`.
_NOT_IN_PLAIN_TRL = (
    "activation_offloading", "int8_activations", "adapter_name_or_path", "torch_compile", "trained_embedding_rows",
)  # fmt: skip


class Plan(plans.Plan):
    """A plan for plain TRL."""

    def to_trl(self, output_dir: str | None = None) -> dict[str, Any]:
        """Return arguments for `SFTTrainer(**plan.to_trl()).train()`, which has the losses of `finetune run`.

        Loads model and rows. Raises a FinetuneError, also for a plan that plain TRL can't train.
        """
        import torch
        from transformers import set_seed
        from trl import SFTConfig

        from finetune.data.preparation import encode
        from finetune.data.tokenizer import load_tokenizer
        from finetune.methods.trl_arguments import trl_arguments
        from finetune.model.techniques import optimizer_class

        settings = self.settings
        _require_plain_trl(settings)
        if not (self.card.is_cpu or torch.cuda.is_available()):
            raise NoCard(f"the plan is for {self.card.name}, but torch sees no GPU here", "Call to_trl() where you train.")
        tokenizer = load_tokenizer(settings)
        rows = encode(settings, tokenizer).select(settings, settings.max_length)
        rows.raise_problems()
        arguments = trl_arguments(
            settings, output_dir=output_dir or settings.output_dir, total_steps=self.total_steps,
            evaluates=rows.eval is not None, on_cpu=self.card.is_cpu,
        )  # fmt: skip
        # all epochs become one dataset, in the run's order: a step between two epochs may have rows of both
        arguments |= {"train_sampling_strategy": "sequential", "num_train_epochs": 1}
        arguments["max_steps"] = self.total_steps or arguments["max_steps"]
        set_seed(settings.seed)  # before the adapters get their random values
        return {
            "model": _model_with_adapters(settings, on_cpu=self.card.is_cpu),
            "args": SFTConfig(**arguments),
            "train_dataset": _in_training_order(rows, settings, self.total_steps or 1),
            "eval_dataset": rows.eval,
            "processing_class": tokenizer,
            "optimizer_cls_and_kwargs": optimizer_class(settings),
            "callbacks": _callbacks(settings),
        }


def plan(model: str, dataset: str | None = None, *, gpu: str = "auto", **settings: Any) -> Plan:
    """Plan the fastest run that fits: `finetune.plan("Qwen/Qwen3-8B", "rows.jsonl", gpu="rtx-4090", lora_r=16).settings`.

    `model`, `dataset`: hub names or paths. Without a dataset, rows have `max_length` tokens. Raises a FinetuneError.
    """
    recipe = recipe_from({"model_name_or_path": model, "dataset": {"path": dataset or NO_DATASET}, "gpu": gpu, **settings})
    return _trl_plan(plan_recipe(recipe, find_card(gpu), without_rows if dataset is None else read_rows))


def read_plan(path: str | Path) -> Plan:
    """Read a plan from a run or from `finetune plan --json > FILE`. Raises a FinetuneError."""
    return _trl_plan(plans.read_plan(Path(path)))


def _trl_plan(planned: plans.Plan) -> Plan:
    return Plan(**{field.name: getattr(planned, field.name) for field in fields(planned)})


def _require_plain_trl(settings: Settings) -> None:
    unsupported = [f"{name}={getattr(settings, name)}" for name in _NOT_IN_PLAIN_TRL if getattr(settings, name)]
    if METHODS[settings.method].has_own_format:
        unsupported.append(f"method={settings.method}")
    if settings.launch.num_processes != 1:
        unsupported.append("launch.num_processes")
    if unsupported:
        raise RecipeError(f"plain TRL can't train a plan with {', '.join(unsupported)}", "Drop them, or use `finetune run`.")


def _model_with_adapters(settings: Settings, *, on_cpu: bool) -> Any:
    from finetune.model.adapters import attach_adapters
    from finetune.model.build import build_base
    from finetune.model.techniques import apply_techniques
    from finetune.model.transformers_config import load_config

    base = build_base(settings, load_config(settings), device="cpu" if on_cpu else "cuda:0", weights=True, offloads=True)
    model = attach_adapters(base, settings)
    apply_techniques(model, settings)
    return model


def _in_training_order(rows: SelectedRows, settings: Settings, total_steps: int) -> Dataset:
    from finetune.data.splits import pack
    from finetune.methods.row_order import LongestEarly, row_lengths

    train = pack(rows.train, settings.max_length, settings.seed) if settings.packing else rows.train
    order = LongestEarly(row_lengths(train), settings.seed, settings.effective_batch_size, total_steps)
    epochs = max(1, -(-total_steps * settings.effective_batch_size // len(train)))  # rounded up
    indices: list[int] = []
    for epoch in range(epochs):
        order.set_epoch(epoch)
        indices += order
    return train.select(indices)


def _callbacks(settings: Settings) -> list[Any]:
    from transformers import TrainerCallback

    from finetune.model.adapters import prepare_for_training

    class AdapterPrecision(TrainerCallback):
        # TRL's trainer casts the adapters of a 4-bit model to bf16 in its constructor
        def on_train_begin(self, args: Any, state: Any, control: Any, model: Any = None, **_: Any) -> None:
            prepare_for_training(model, settings)

    return [AdapterPrecision()]
