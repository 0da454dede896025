"""Configurations that are recognised and not read: whose they are, and the settings here that mean what their keys mean."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True)
class UnreadTool:
    """A tool recognised by all keys of one of `markers`; `settings` are its dotted keys -> ours; `advice` is what to do."""

    name: str
    markers: tuple[frozenset[str], ...]
    settings: dict[str, str] = field(default_factory=dict)
    advice: str = ""


def _keys(*markers: str) -> tuple[frozenset[str], ...]:
    return tuple(frozenset(marker.split()) for marker in markers)


_SAME_NAME = ("learning_rate", "num_train_epochs", "max_steps", "lr_scheduler_type", "warmup_ratio", "weight_decay")

#: Names of keys from each project's own examples, read on 2026-08-22.
UNREAD: tuple[UnreadTool, ...] = (
    UnreadTool("LitGPT", _keys("out_dir precision train", "checkpoint_dir train"), {
        "checkpoint_dir": "model_name_or_path", "lora_r": "lora_r", "lora_alpha": "lora_alpha",
        "lora_dropout": "lora_dropout", "train.global_batch_size": "effective_batch_size",
        "train.epochs": "num_train_epochs", "train.max_steps": "max_steps", "train.max_seq_length": "max_length",
        "train.lr_warmup_steps": "warmup_steps", "train.max_norm": "max_grad_norm",
        "optimizer.init_args.lr": "learning_rate", "optimizer.init_args.weight_decay": "weight_decay",
    }),
    UnreadTool("SkyPilot", _keys("resources run", "resources setup", "num_nodes run"),
               advice="`finetune export-launch` writes job files; pass the configuration that its commands name."),
    UnreadTool("Oumi", _keys(
        "model.model_name training.trainer_type", "model.model_name peft.lora_r", "model generation", "model engine",
        "judge_params inference_config", "judge_params", "model.model_name tasks", "model.model_name training",
        "strategy_params", "inference_config strategy", "tuning.n_trials", "inference_engine model",
    ), {
        "model.model_name": "model_name_or_path", "model.model_max_length": "max_length", "peft.lora_r": "lora_r",
        "peft.lora_alpha": "lora_alpha", "peft.lora_dropout": "lora_dropout",
        "peft.lora_target_modules": "target_modules", "peft.q_lora": "load_in_4bit", "training.optimizer": "optim",
        "training.per_device_train_batch_size": "per_device_train_batch_size",
        "training.gradient_accumulation_steps": "gradient_accumulation_steps",
        **{f"training.{name}": name for name in _SAME_NAME},
    }),
    UnreadTool("AutoTrain", _keys("task base_model params", "task base_model project_name"), {
        "base_model": "model_name_or_path", "data.path": "dataset.path", "data.train_split": "dataset.split",
        "data.valid_split": "dataset.eval_split", "params.epochs": "num_train_epochs", "params.lr": "learning_rate",
        "params.batch_size": "per_device_train_batch_size",
        "params.gradient_accumulation": "gradient_accumulation_steps", "params.block_size": "max_length",
        "params.lora_r": "lora_r", "params.lora_alpha": "lora_alpha", "params.lora_dropout": "lora_dropout",
        "params.target_modules": "target_modules", "params.scheduler": "lr_scheduler_type", "params.optimizer": "optim",
        "params.warmup_ratio": "warmup_ratio", "params.weight_decay": "weight_decay",
    }),
    UnreadTool("ms-swift", _keys(
        "tuner_type model", "train_type model dataset", "split_dataset_ratio", "train.tuner_type", "sampler_type model",
        "sampler_engine", "load_args",
        "rlhf_type model", "load_data_args", "infer_backend max_new_tokens model", "isolated",
    ), {
        "model": "model_name_or_path", "dataset": "dataset.path", "lora_rank": "lora_r", "lora_alpha": "lora_alpha",
        "lora_dropout": "lora_dropout", "target_modules": "target_modules", "max_length": "max_length",
        "per_device_train_batch_size": "per_device_train_batch_size",
        "gradient_accumulation_steps": "gradient_accumulation_steps", "global_batch_size": "effective_batch_size",
        "lr": "learning_rate", "train.lora_rank": "lora_r", "train.lora_alpha": "lora_alpha",
        "split_dataset_ratio": "dataset.test_split_size", "rlhf_type": "method", "rpo_alpha": "sft_weight",
        **{name: name for name in (*_SAME_NAME, "beta", "loss_type", "desirable_weight", "undesirable_weight")},
    }),
    UnreadTool("mistral-finetune", _keys("model_id_or_path lora", "data.instruct_data"), {
        "model_id_or_path": "model_name_or_path", "data.instruct_data": "dataset.path",
        "data.eval_instruct_data": "dataset.eval_path", "lora.rank": "lora_r", "seq_len": "max_length",
        "max_steps": "max_steps", "optim.lr": "learning_rate", "optim.weight_decay": "weight_decay",
        "run_dir": "output_dir",
    }),
    UnreadTool("mergekit", _keys("models merge_method", "slices merge_method", "models method parameters"),
               advice="It merges models; `finetune merge RUN` merges an adapter into its base model."),
    UnreadTool("Accelerate", _keys("compute_environment", "distributed_type num_processes"),
               advice="For several GPUs set launch.num_processes and launch.strategy in the recipe."),
    UnreadTool("DeepSpeed", _keys("zero_optimization"),
               advice="Set launch.strategy=deepspeed and launch.zero_stage in the recipe."),
    UnreadTool("Axolotl's cloud", _keys("provider gpu", "secrets gpu", "gpu_count project_name"),
               advice="Pass Axolotl's training configuration; `finetune export-launch` writes job files."),
    UnreadTool("PEFT's adapter", _keys("peft_type base_model_name_or_path", "peft_type lora_alpha"),
               advice="To continue training an adapter: adapter: FOLDER in a recipe."),
    UnreadTool("a model's", _keys("architectures model_type", "model_type hidden_size"),
               advice="To train that model: `finetune run tiny-cpu model=FOLDER dataset.path=data.jsonl`"),
    UnreadTool("Ludwig", _keys("input_features output_features")),
    UnreadTool("NeMo", _keys("trainer exp_manager")),
    UnreadTool("verl", _keys("actor_rollout_ref")),
)  # fmt: skip


def recognise(flat: dict[str, Any], values: dict[str, Any]) -> UnreadTool | None:
    """The tool of a configuration that finetune doesn't read, by its keys, nested and dotted; None if unknown."""
    keys = {*flat, *values}
    return next((tool for tool in UNREAD if any(marker <= keys for marker in tool.markers)), None)


def advice(tool: UnreadTool, flat: dict[str, Any]) -> str:
    """What to do with the file: the keys in it that recipes have, too, under their names here."""
    if tool.advice:
        return tool.advice
    settings = {key: setting for key, setting in tool.settings.items() if flat.get(key) is not None}
    renamed = [f"{key} is {setting}" for key, setting in settings.items() if key != setting]
    same_names = [key for key, setting in settings.items() if key == setting]
    sentences = [f"In a recipe {', '.join(renamed)}"] if renamed else []
    if same_names:
        sentences.append(f"{', '.join(same_names)} {'keeps its name' if len(same_names) == 1 else 'keep their names'}")
    return "; ".join([*sentences, "`finetune recipes keys` lists the settings."])
