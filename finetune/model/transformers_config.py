"""Configurations of transformers classes, made from config.json."""

from __future__ import annotations

from typing import Any

from huggingface_hub.errors import StrictDataclassError
from transformers import AutoConfig, AutoModelForCausalLM, PretrainedConfig
from transformers.dynamic_module_utils import get_class_from_dynamic_module
from transformers.models.auto.auto_factory import add_generation_mixin_to_remote_model
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from finetune.compat.transformers import without_session_id
from finetune.data.report import first_line
from finetune.errors import RecipeError
from finetune.model.configuration import read_config, resolve_model_path
from finetune.model.language_model import mark_vision, model_class, text_config
from finetune.settings import Recipe

#: For a missing key a configuration class would take its default, another model's dimension. `attribute_map` has other names.
_NEEDED = ("hidden_size", "num_hidden_layers", "num_attention_heads", "vocab_size")


def load_config(settings: Recipe) -> PretrainedConfig:
    """Return the model's configuration from its folder, the hub or the catalogue. Raises RecipeError."""
    without_session_id()  # before the first request
    return config_from(read_config(settings), settings)


def config_from(values: dict[str, Any], settings: Recipe) -> PretrainedConfig:
    """Return a configuration from the content of config.json.

    Raises RecipeError for an unknown model type, a model that needs remote code, or missing or impossible dimensions.
    """
    name, kind = settings.model_name_or_path, values.get("model_type")
    if not isinstance(kind, str):
        raise RecipeError(f"model_name_or_path {name}: its config.json has no model_type", "Give a transformers model.")
    if kind not in CONFIG_MAPPING:
        return _remote_config(name, kind, values, settings)
    config_class = CONFIG_MAPPING[kind]
    _refuse_missing(name, values, config_class)
    try:
        # `auto_map` would import code of the repository: known types need none
        arguments = {key: value for key, value in values.items() if key not in ("model_type", "auto_map")}
        config = _config_of(config_class, arguments)
        if settings.vision is True:
            mark_vision(config)
    except (StrictDataclassError, TypeError, ValueError, KeyError, AttributeError, ZeroDivisionError) as error:
        raise RecipeError(f"model_name_or_path {name}: its config.json is not valid for a {kind} model: {error}") from None
    if reason := _why_no_decoder(config):
        raise RecipeError(f"model_name_or_path {name}: model_type {kind} {reason}", "Give a model that continues text.")
    layers = config.num_hidden_layers if text_config(config) is config else None
    if layers and values.get("num_hidden_layers", layers) != layers:
        raise RecipeError(
            f"model_name_or_path {name}: its config.json has num_hidden_layers {values['num_hidden_layers']}, "
            f"but describes {layers}",
            "Correct num_hidden_layers, or the list or pattern of layers.",
        )
    return config


def _config_of(config_class: type[PretrainedConfig], values: dict[str, Any]) -> PretrainedConfig:
    try:
        # The class is used directly: `from_pretrained` would ask the hub again.
        return config_class.from_dict(dict(values))
    # The file sets read-only properties of the class: leave them out. Not in the first attempt, because Nemotron-H's
    # constructor reads such keys, and would build four layers without them.
    except AttributeError:
        return config_class.from_dict(
            {key: value for key, value in values.items() if not isinstance(getattr(config_class, key, None), property)}
        )


def _why_no_decoder(config: PretrainedConfig) -> str | None:
    if getattr(config, "is_encoder_decoder", False):
        return "is an encoder with a decoder"
    if hasattr(config, "is_decoder") and config.model_type not in ("gpt_neox", "gpt_neox_japanese"):
        return "is an encoder: each token sees the whole text"
    if model_class(config) is None:
        return "is not a causal language model"
    if not getattr(text_config(config), "num_hidden_layers", None):
        return "has no single stack of layers"
    return None


def _remote_config(name: str, kind: str, values: dict[str, Any], settings: Recipe) -> PretrainedConfig:
    if "auto_map" not in values:
        raise RecipeError(
            f"model_name_or_path {name}: transformers does not know model_type {kind!r}", "Give another base model."
        )
    if not settings.trust_remote_code:
        raise RecipeError(
            f"model_name_or_path {name}: model_type {kind!r} needs code from the model's repository, which is not trusted",
            "Read that code, then set trust_remote_code=true and model_revision to its full commit.",
        )
    if "--" in str(values["auto_map"]):
        raise RecipeError(
            f"model_name_or_path {name}: its code is in another repository, which model_revision does not pin",
            "Give another base model.",
        )
    path, revision = resolve_model_path(settings), settings.model_revision
    try:
        config = AutoConfig.from_pretrained(path, revision=revision, trust_remote_code=True)
        # registered, because from_config would otherwise take the class from the repository's newest commit
        if code := values["auto_map"].get("AutoModelForCausalLM"):
            model = add_generation_mixin_to_remote_model(get_class_from_dynamic_module(code, path, revision=revision))
            AutoModelForCausalLM.register(type(config), model, exist_ok=True)
    except Exception as error:  # noqa: BLE001 - the repository's own code
        problem = f"its own code can't be loaded: {type(error).__name__}: {first_line(error)}"
        raise RecipeError(f"model_name_or_path {name}: {problem}", "Install what it needs, or use another model.") from error
    return config


def _refuse_missing(name: str, values: dict[str, Any], config_class: type[PretrainedConfig]) -> None:
    text_values = next((values[key] for key in ("text_config", "llm_config") if isinstance(values.get(key), dict)), None)
    other_names = config_class.attribute_map
    if text_values is None:
        text_values = values
        needed = [key for key in _NEEDED if hasattr(config_class, other_names.get(key, key))]  # Mamba has no heads
    else:
        needed = list(_NEEDED[:2])  # multimodal files leave the rest to the text model's class
    needed = [key for key in needed if not isinstance(getattr(config_class, key, None), property)]  # computed from others
    problems = []
    for key in needed:
        value = text_values.get(key, text_values.get(other_names.get(key, key)))
        if value is None:
            problems.append(f"model_name_or_path {name}: its config.json has no {key}")
        elif not isinstance(value, int) or isinstance(value, bool) or value < 1:
            problems.append(
                f"model_name_or_path {name}: {key} is {value!r} in its config.json; must be a positive whole number"
            )
    if problems:
        raise RecipeError(problems, "Give a complete config.json; the model's size depends on these values.")
