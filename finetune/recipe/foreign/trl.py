"""TRL's own YAML, as `trl sft --config` reads it."""

from __future__ import annotations

from typing import Any

from finetune.recipe.foreign import common
from finetune.recipe.foreign.preferences import (
    LABEL_SMOOTHING,
    NO_WEIGHTING,
    OTHER_METHODS,
    OTHER_REFERENCE,
    has_pairs_or_labels,
    read_loss,
    read_preferences,
    row_format_of,
)
from finetune.recipe.foreign.rules import ConfigReader, Ignore, Keep, Read, Refuse, Rule, Tool, each, kept
from finetune.recipe.foreign.shared import (
    TRAINING_ARGUMENTS,
    TRAINING_DEFAULTS,
    assume_peft_targets,
    merged_or_refused,
    read_targets,
    read_training_arguments,
)
from finetune.settings.base_formats import BITS_16, switches
from finetune.settings.methods import METHODS
from finetune.settings.schema import ALIASES, SWITCHES, Recipe

_REWARDS = (
    "reward_funcs", "reward_weights", "num_generations", "max_completion_length", "log_completions", "temperature",
    "dataset_prompt_column", "system_prompt", "use_vllm", "num_iterations", "epsilon", "scale_rewards",
)  # fmt: skip
#: Keys of `trl dpo`, also of earlier releases. With one of these, or a loss of pairs, a file is its.
_PAIR_KEYS: dict[str, Rule] = {
    "beta": Keep("beta", float), "label_smoothing": LABEL_SMOOTHING, "loss_weights": Refuse("one loss", ([1.0],)),
    "ld_alpha": NO_WEIGHTING, "use_weighting": NO_WEIGHTING, "reference_free": OTHER_REFERENCE,
    "sync_ref_model": OTHER_REFERENCE, "f_divergence_type": Refuse("the divergence is the reverse KL", ("reverse_kl",)),
    "rpo_alpha": Refuse("adds SFT's loss, a mean over the tokens of a micro-batch", lifted_by="sft_weight"),
    "max_prompt_length": Read(), "disable_dropout": Read(),
    **dict.fromkeys(("precompute_ref_log_probs", "precompute_ref_batch_size"), common.MEMORY),
    **dict.fromkeys(
        ("ref_model_mixup_alpha", "ref_model_sync_steps", "f_alpha_divergence_coef", "discopop_tau"),
        Ignore("belongs to a key that this file doesn't use"),
    ),
}  # fmt: skip
_KTO_KEYS: dict[str, Rule] = {
    "desirable_weight": Keep("desirable_weight", float), "undesirable_weight": Keep("undesirable_weight", float),
}  # fmt: skip
_PAIR_LOSSES = {
    "sigmoid", "hinge", "ipo", "exo_pair", "nca_pair", "robust", "bco_pair", "sppo_hard", "aot", "aot_unpaired", "aot_pair",
    "apo_zero", "apo_down", "discopop", "sigmoid_norm",
}  # fmt: skip
_ONLY_SFT = ("assistant_only_loss", "completion_only_loss", "dataset_text_field", "packing_strategy", "eval_packing")

KEYS: dict[str, Rule] = {
    **TRAINING_ARGUMENTS,
    **kept("model_name_or_path lora_r lora_alpha use_rslora use_dora load_in_4bit load_in_8bit packing"),
    **each(common.KERNELS, "attn_implementation use_flash_attention_2 use_liger ignore_bias_buffers"),
    **each(Read(), """
        use_peft lora_target_modules tokenizer_name_or_path dataset_name dataset_test_split dataset_text_field dataset_kwargs
        dataset_mixture dataset_mixer dataset_splits completion_only_loss assistant_only_loss loss_type
    """),
    **each(common.MEMORY, """
        bnb_4bit_quant_storage dataset_streaming eval_packing padding_free pad_to_multiple_of activation_offloading
        gradient_checkpointing_use_reentrant
    """),
    **each(Keep("dtype"), "dtype torch_dtype"),
    **each(Keep("max_length"), "max_length max_seq_length"),
    "model_revision": Keep("model_revision", lambda name: None if name == "main" else name),
    "model_init_kwargs": Refuse("the model is loaded by finetune"), "trust_remote_code": common.REMOTE_CODE,
    "lora_dropout": Keep("lora_dropout", float), "lora_task_type": Ignore("is what finetune does"),
    "lora_modules_to_save": common.WHOLE_MODULES, "lora_target_parameters": Refuse("adapters are on linear layers"),
    "bnb_4bit_quant_type": Refuse("4 bits are NF4", ("nf4",)),
    "use_bnb_nested_quant": Ignore("4 bits are always quantised twice, which saves 0.4 bits a weight"),
    "dataset_config": Keep("dataset.name"), "dataset_train_split": Keep("dataset.split"),
    "datasets": Refuse("one dataset is read", lifted_by="dataset.path"), "dataset_num_proc": common.DATASET_CACHE,
    "chat_template": Refuse("save the template as a file", lifted_by="chat_template"), **dict.fromkeys(_PAIR_KEYS, Read()),
    **dict.fromkeys(_REWARDS, Refuse(OTHER_METHODS["grpo"])), **dict.fromkeys(_KTO_KEYS, Read()),
    "simpo_gamma": Refuse(OTHER_METHODS["simpo"]), "cpo_alpha": Refuse(OTHER_METHODS["cpo"]),
    "hub_model_revision": common.UPLOAD, "env": common.PROCESS,
    "truncation_mode": Refuse("the start is kept", ("keep_start",)),
    "packing_strategy": Refuse("rows are packed whole", ("bfd", "ffd")), "pad_token": Ignore("padding is never learnt"),
    "eos_token": Refuse("the model's own EOS is used"), "chat_template_path": Keep("chat_template"),
    "shuffle_dataset": Ignore("rows are shuffled anyway"), "router_aux_loss_coef": Refuse("the router's loss is not added"),
}  # fmt: skip

DEFAULTS: dict[str, Any] = {
    **TRAINING_DEFAULTS, "learning_rate": 2e-5, "lora_r": 16, "lora_alpha": 32.0, "lora_dropout": 0.05, "max_length": 1024,
    "excess_length": "truncate", **switches(BITS_16), "packing": False,
}  # fmt: skip


_LOSS_NOTE = (
    "as TRL does without assistant_only_loss, prompts of messages are learnt, too; of rows with prompt and completion TRL "
    "learns only the completion: then set train_on_inputs=false"
)


def finish(config: ConfigReader) -> None:
    """Keys of TRL that combine."""
    read_training_arguments(config)
    lengths = ("max_length", "max_seq_length")
    is_null = any(key in config.lines for key in lengths) and not any(key in config.values for key in lengths)
    if is_null and not {"max_length", "excess_length"} & set(config.overrides):
        config.assume("excess_length", "raise", "max_length is null: no row is cut; one too long stops the run")
        config.settings["max_length"] = "auto"
    if "lora_target_modules" in config.values:
        read_targets(config, "lora_target_modules")
    else:
        assume_peft_targets(config, str(config.overrides.get("model_name_or_path") or config.value("model_name_or_path", "")))
    if config.value("tokenizer_name_or_path") == config.value("model_name_or_path"):
        config.ignore("tokenizer_name_or_path", "is the model's own")
    elif "tokenizer_name_or_path" in config.values:
        config.refuse("tokenizer_name_or_path", "the model's own tokenizer is used")
    if config.is_on("use_peft"):
        config.ignore("use_peft", "is what finetune does")
    else:
        state = "is off" if "use_peft" in config.values else "is not set"
        config.refuse("use_peft", f"{state}, which trains all parameters; use_peft: true trains LoRA adapters, as here")
    if has_pairs_or_labels(method := _method(config)):
        _preferences(config, method)
    else:
        _loss(config)
    if not config.is_replaced("dataset.path", ["dataset_name"]):
        config.keep("dataset_name", "dataset.path", config.value("dataset_name"))
    _mixture(config)
    if "dataset_text_field" in config.values and "dataset_text_field" not in config.entries:
        field = config.value("dataset_text_field")
        if field == "text":
            config.ignore("dataset_text_field", "is found by its name")
        else:
            config.keep("dataset_text_field", "dataset.columns", {"text": field})
    if config.value("eval_strategy", "no") == "no":
        config.ignore("dataset_test_split", "eval_strategy is no")
    else:
        config.keep("dataset_test_split", "dataset.eval_split", config.value("dataset_test_split"))


def _mixture(config: ConfigReader) -> None:
    """The alignment handbook's list of datasets with their weights."""
    kwargs = config.value("dataset_kwargs")
    if isinstance(kwargs, dict) and all(value is False for value in kwargs.values()):
        config.ignore("dataset_kwargs", "the template writes the special tokens")
    elif kwargs:
        config.refuse("dataset_kwargs", "rows are prepared by finetune")
    keys = [key for key in ("dataset_mixture", "dataset_mixer", "dataset_splits") if key in config.values]
    if not keys or config.is_replaced("dataset.path", keys):
        return
    mixture = config.value("dataset_mixture")
    entries = mixture.get("datasets") if isinstance(mixture, dict) else None
    if keys != ["dataset_mixture"] or not isinstance(entries, list) or not all(_is_plain(entry) for entry in entries):
        for key in keys:
            config.refuse(key, "is a mixture of datasets that finetune doesn't read", "dataset.path")
        return
    merged = merged_or_refused(config, "dataset_mixture", [*_joined_splits(entries)])
    if not merged:
        return
    held_out = {"test_split_size": mixture["test_split_size"]} if mixture.get("test_split_size") else {}
    for setting, value in reversed({**merged, **held_out}.items()):
        config.keep("dataset_mixture", f"dataset.{setting}", value)


def _is_plain(entry: Any) -> bool:
    """Whether a dataset of a mixture has only keys and columns that finetune reads."""
    columns = {"messages", "prompt", "completion", "text", "chosen", "rejected", "label"}
    return (
        isinstance(entry, dict)
        and set(entry) <= {"id", "config", "split", "columns", "weight"}
        and isinstance(entry.get("id"), str)
        and set(entry.get("columns") or []) <= columns
    )


def _joined_splits(entries: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Each dataset as settings; the splits of one dataset as one, `train+test`, as the hub's loader reads it."""
    datasets: dict[tuple[str, str | None, float], dict[str, Any]] = {}
    for entry in entries:
        weight, split = float(entry.get("weight") or 1.0), str(entry.get("split") or "train")
        dataset = datasets.setdefault((entry["id"], entry.get("config"), weight), {"path": entry["id"], "split": ""})
        dataset["split"] = f"{dataset['split']}+{split}".lstrip("+")
        dataset |= {"name": entry["config"]} if entry.get("config") not in (None, "default") else {}
        dataset |= {"weights": [weight]} if weight != 1.0 else {}
    for dataset in datasets.values():
        if dataset["split"] == "train":
            del dataset["split"]
    return list(datasets.values())


def _method(config: ConfigReader) -> str:
    """Whether the file is one of `trl kto` or `trl dpo`, which it doesn't say: by its keys, and not by those of others."""
    loss, keys = config.value("loss_type"), config.values.keys()
    if "method" in config.overrides:
        return str(config.overrides["method"])
    if loss in METHODS["kto"].losses or keys & _KTO_KEYS.keys():
        return "kto"
    has_pairs = isinstance(loss, list) or loss in _PAIR_LOSSES or keys & _PAIR_KEYS.keys()
    return "dpo" if has_pairs and not keys & _OTHER_METHODS_KEYS else "sft"


def _preferences(config: ConfigReader, method: str) -> None:
    """Keys and defaults of `trl dpo` or `trl kto`."""
    config.assume("method", method, f"read as a file of `trl {method}`, by its keys: method=sft if it is not")
    config.assume("learning_rate", 1e-6)
    read_loss(config, "loss_type", method)
    dropout = config.settings.get("lora_dropout", DEFAULTS["lora_dropout"])
    read_preferences(config, _PAIR_KEYS | (_KTO_KEYS if row_format_of(method) == "labelled" else {}), method)
    if config.value("disable_dropout") is False:
        config.keep("disable_dropout", "lora_dropout", dropout)
    config.ignore("disable_dropout", "dropout is off")
    config.ignore("max_prompt_length", "max_length is the only limit", "there the start of a longer prompt was cut")
    for key in _ONLY_SFT:
        if key in config.values:
            config.refuse(key, f"is a key of `trl sft`, which `trl {method}` doesn't have")


def _loss(config: ConfigReader) -> None:
    """Which tokens are learnt. TRL also learns the prompts of messages, but of prompt and completion only the completions."""
    for key in (name for name in (*_PAIR_KEYS, *_KTO_KEYS) if name in config.values):
        config.ignore(key, "is of a method that this file doesn't use")
    if "loss_type" in config.values:
        config.apply("loss_type", Refuse("the loss is the cross entropy", ("nll", "chunked_nll")))
    answer_only_keys = [key for key in ("assistant_only_loss", "completion_only_loss") if config.is_on(key)]
    for key in ("assistant_only_loss", "completion_only_loss"):
        config.keep(key, "train_on_inputs", not answer_only_keys)
    config.assume("train_on_inputs", True, _LOSS_NOTE if "dataset_text_field" not in config.values else "")


_OTHER_METHODS_KEYS = {*_REWARDS, "simpo_gamma", "cpo_alpha"}


def has_only_its_keys(values: dict[str, Any]) -> bool:
    """Whether a configuration without a key of its own is TRL's: all its keys are, and three or more are not a recipe's."""
    others = set(values) - {*Recipe.model_fields, *ALIASES, *SWITCHES}
    return len(others) >= 3 and all(key in KEYS for key in values)


TOOL = Tool(
    "TRL",
    "use_peft dataset_name dataset_text_field lora_task_type assistant_only_loss dataset_mixture dataset_mixer "
    "dataset_train_split chat_template_path completion_only_loss use_bnb_nested_quant",
    KEYS, DEFAULTS, finish,
)  # fmt: skip
