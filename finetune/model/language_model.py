"""The language model of a multimodal checkpoint, without image, video and sound parts."""

from __future__ import annotations

import inspect
import re
from functools import cache
from typing import Any

from transformers import AutoModelForCausalLM, AutoModelForImageTextToText, PretrainedConfig, PreTrainedModel
from transformers.utils import ModelOutput

#: Names of projectors in transformers' models, beside the tower or at its end.
_PROJECTORS = (
    "multi_modal_projector", "connector", "merger", "deepstack_merger_list", "embed_vision", "vision_projection", "aligner",
    "patch_merger",
)  # fmt: skip
#: Arguments of the whole model that text has too, though a language model may take them only among its keywords.
_OF_TEXT = {"attention_mask", "position_ids", "past_key_values", "cache", "inputs_embeds", "use_cache", "output_router_logits"}


def text_config(config: PretrainedConfig) -> PretrainedConfig:
    """Return the configuration of the language model."""
    return config.get_text_config(decoder=True)


def is_multimodal(config: PretrainedConfig) -> bool:
    """Return whether a configuration has a language model among other parts."""
    return _image_text_class(config) is not None and text_config(config) is not config


def _image_text_class(config: PretrainedConfig) -> Any:
    return AutoModelForImageTextToText._model_mapping.get(type(config), None)


def mark_vision(config: PretrainedConfig) -> None:
    """Mark a configuration to build the vision tower, too. Raises ValueError without a vision tower."""
    if not is_multimodal(config):
        raise ValueError("it has no vision tower")
    config.loads_vision = True


def loads_vision(config: PretrainedConfig) -> bool:
    """Return whether a configuration is marked by `mark_vision`."""
    return bool(getattr(config, "loads_vision", False))


def model_class(config: PretrainedConfig) -> type[PreTrainedModel] | None:
    """Return the class to build: a causal or multimodal model, or None."""
    whole = _image_text_class(config)
    if is_multimodal(config):
        return _subclass(whole, loads_vision(config))
    causal: Any = AutoModelForCausalLM._model_mapping.get(type(config), None)
    return whole if causal is None and whole is not None and whole.__name__.endswith("ForCausalLM") else causal


def attention_by_part(config: PretrainedConfig, attention: str | None) -> str | dict[str, str] | None:
    """Return `attn_implementation` for building, by part of a multimodal model."""
    if attention is None or not is_multimodal(config) or loads_vision(config):
        return attention
    # parts that are left out may not support the language model's kernel
    text = text_config(config)
    return {"": attention} | {
        name: attention if getattr(config, name, None) is text else "eager" for name in config.sub_configs
    }


def outside_language_model(model: Any) -> str | None:
    """Return PEFT's `exclude_modules` for modules outside the language model; None for a text model."""
    path = getattr(model, "language_model_path", None)
    return path and rf"(?!({'|'.join(map(re.escape, _kept_modules(model)))})(\.|$)).*"


def untrained_vision(model: Any, trained: str) -> str | None:
    """Return PEFT's `exclude_modules` for vision parts that are not trained; None for a text model."""
    path = getattr(model, "decoder_path", "")
    if not path:
        return None
    if trained == "all":
        return _unread_layers(model)
    adapted = rf"{re.escape(path)}(\.|$)|lm_head(\.|$)"
    if trained == "projector":
        names = "|".join(_PROJECTORS)
        adapted += rf"|(.*\.)?({names})(\.|$)"
    return rf"(?!({adapted})).*"


def _unread_layers(model: Any) -> str | None:
    # where the model reads an earlier layer's output, as LLaVA does, the tower's last layers get no gradient
    read = getattr(model.config, "vision_feature_layer", None)
    count = getattr(getattr(model.config, "vision_config", None), "num_hidden_layers", None)
    if read is None or not count:
        return None
    indices = read if isinstance(read, (list, tuple)) else [read]
    end = max(index if index >= 0 else count + 1 + index for index in indices)  # the embeddings' output is number 0
    numbers = "|".join(map(str, range(end, count)))
    return rf"(.*\.)?vision_tower\.(.*\.)?layers\.({numbers})\..*" if numbers else None


@cache
def _subclass(whole: type[PreTrainedModel], vision: bool) -> type[PreTrainedModel]:
    # the same class name, by which transformers looks up how a checkpoint's tensors are renamed
    members = {} if vision else {"base_model": property(_body), "get_output_embeddings": _head}

    def init(self: Any, config: PretrainedConfig, *arguments: Any, **named: Any) -> None:
        whole.__init__(self, config, *arguments, **named)
        if vision:
            self.decoder_path, _ = _find_decoder(self)
        else:
            _keep_language_model(self)

    return type(
        whole.__name__, (whole,), {"__init__": init, "__module__": whole.__module__, "__doc__": whole.__doc__, **members}
    )


def _decoder(model: Any) -> Any:
    path = getattr(model, "language_model_path", None)
    return model.get_submodule(path) if path else None


def _body(model: Any) -> Any:
    decoder = _decoder(model)
    if decoder is None:
        return getattr(model, model.base_model_prefix, model) if model.base_model_prefix else model
    if _has_head(decoder):  # Llama 4 names a prefix that its decoder lacks
        return decoder.model if decoder.base_model is decoder else decoder.base_model
    return model.get_submodule(model.language_model_path.rpartition(".")[0])


def _head(model: Any) -> Any:
    decoder = _decoder(model)
    if decoder is not None and _has_head(decoder):
        return decoder.get_output_embeddings()
    return getattr(model, "lm_head", None)


def _has_head(decoder: Any) -> bool:
    return decoder.get_output_embeddings() is not None


# parameters keep their names in the whole model, so that weights load as usual and an adapter fits the whole model
def _keep_language_model(model: Any) -> None:
    decoder_path, decoder = _find_decoder(model)
    parent = decoder_path.rpartition(".")[0]
    own_head = bool(decoder_path) and _has_head(decoder)
    if not decoder_path or not isinstance(decoder, PreTrainedModel) or not (own_head or (parent and hasattr(model, "lm_head"))):
        raise ValueError("its language model can't be separated from its other parts")
    model.language_model_path = decoder_path
    kept_names = _kept_modules(model)
    for path in {"", parent}:
        module = model.get_submodule(path)
        parts = [*module.named_children(), *module.named_parameters(recurse=False), *module.named_buffers(recurse=False)]
        for child, _ in parts:
            name = f"{path}.{child}" if path else child
            if not any(name == other or other.startswith(f"{name}.") for other in kept_names):
                delattr(module, child)
    whole = model.get_submodule(parent)
    whole.forward = _text_forward(decoder, whole)


def _find_decoder(model: Any) -> tuple[str, Any]:
    own = [part for name in ("language_model", "text_model") if (part := getattr(model, name, None)) is not None]
    decoder = own[0] if own else model.get_decoder()
    return next((name for name, module in model.named_modules() if module is decoder), ""), decoder


def _kept_modules(model: Any) -> list[str]:
    path = model.language_model_path
    return [path] if _has_head(_decoder(model)) else [path, "lm_head"]


def _text_forward(decoder: Any, whole: Any) -> Any:
    of_whole = inspect.signature(type(whole).forward)
    # arguments of images and sound
    others = set(of_whole.parameters) - set(inspect.signature(decoder.forward).parameters) - _OF_TEXT

    def forward(*arguments: Any, **named: Any) -> Any:
        call_arguments = of_whole.bind(whole, *arguments).arguments | named
        call_arguments = {name: value for name, value in call_arguments.items() if name not in others and value is not whole}
        output = decoder(**call_arguments)
        return _TextOutput(output) if isinstance(output, ModelOutput) else output  # tuples stay tuples

    return forward


class _TextOutput:
    """A language model's output, with None for fields of the whole model."""

    def __init__(self, output: ModelOutput):
        self._output = output

    def __getattr__(self, name: str) -> Any:
        return getattr(self._output, name, None)

    def __getitem__(self, key: Any) -> Any:
        return self._output[key]
