"""The language model of a multimodal checkpoint, without image, video and sound parts."""

from __future__ import annotations

import inspect
import re
from functools import cache
from typing import Any

from transformers import AutoModelForCausalLM, AutoModelForImageTextToText, PretrainedConfig, PreTrainedModel
from transformers.utils import ModelOutput

#: Names of the projectors from a vision tower to the language model, beside the tower or at its end.
_PROJECTORS = (
    "multi_modal_projector", "connector", "merger", "deepstack_merger_list", "embed_vision", "vision_projection", "aligner",
    "patch_merger",
)  # fmt: skip
#: Arguments of the whole model for text, though a language model may take them only as `**kwargs`.
_FOR_TEXT = {"attention_mask", "position_ids", "past_key_values", "cache", "inputs_embeds", "use_cache", "output_router_logits"}


def text_config(config: PretrainedConfig) -> PretrainedConfig:
    """Return the configuration of the language model."""
    return config.get_text_config(decoder=True)


def is_multimodal(config: PretrainedConfig) -> bool:
    """Return whether a configuration has a language model among other parts."""
    return _image_text_class(config) is not None and text_config(config) is not config


def _image_text_class(config: PretrainedConfig) -> Any:
    return AutoModelForImageTextToText._model_mapping.get(type(config), None)


def mark_vision(config: PretrainedConfig) -> None:
    """Make `model_class` build the vision tower, too. Raises ValueError without a vision tower."""
    if not is_multimodal(config):
        raise ValueError("it has no vision tower")
    config.loads_vision = True


def loads_vision(config: PretrainedConfig) -> bool:
    """Return whether `mark_vision` marked a configuration."""
    return bool(getattr(config, "loads_vision", False))


def model_class(config: PretrainedConfig) -> type[PreTrainedModel] | None:
    """Return the class of a causal or multimodal model, or None."""
    image_text: Any = _image_text_class(config)
    if is_multimodal(config):
        return _subclass(image_text, loads_vision(config))
    causal: Any = AutoModelForCausalLM._model_mapping.get(type(config), None)
    if causal is None and image_text is not None and image_text.__name__.endswith("ForCausalLM"):
        return image_text
    return causal


def attention_by_part(config: PretrainedConfig, attention: str | None) -> str | dict[str, str] | None:
    """Return `attn_implementation` for building, by part of a multimodal model."""
    if attention is None or not is_multimodal(config) or loads_vision(config):
        return attention
    # other parts are not built, and may not support the language model's attention
    text = text_config(config)
    by_part = {name: attention if getattr(config, name, None) is text else "eager" for name in config.sub_configs}
    return {"": attention, **by_part}


def outside_language_model(model: Any) -> str | None:
    """Return a pattern of module names outside the language model, or None."""
    if not getattr(model, "language_model_path", None):
        return None
    return rf"(?!({'|'.join(map(re.escape, _kept_modules(model)))})(\.|$)).*"


def untrained_vision(model: Any, train_vision: str) -> str | None:
    """Return a pattern of the names of untrained vision modules, or None."""
    path = getattr(model, "decoder_path", "")
    if not path:
        return None
    if train_vision == "all":
        return _unread_layers(model)
    trained = rf"{re.escape(path)}(\.|$)|lm_head(\.|$)"
    if train_vision == "projector":
        names = "|".join(_PROJECTORS)
        trained += rf"|(.*\.)?({names})(\.|$)"
    return rf"(?!({trained})).*"


def _unread_layers(model: Any) -> str | None:
    # where the model reads an earlier layer's output, as LLaVA does, the tower's last layers get no gradient
    read = getattr(model.config, "vision_feature_layer", None)
    layers = getattr(getattr(model.config, "vision_config", None), "num_hidden_layers", None)
    if read is None or not layers:
        return None
    indices = read if isinstance(read, (list, tuple)) else [read]
    first_unread = max(index if index >= 0 else layers + 1 + index for index in indices)  # index 0 is the embeddings' output
    numbers = "|".join(map(str, range(first_unread, layers)))
    return rf"(.*\.)?vision_tower\.(.*\.)?layers\.({numbers})\..*" if numbers else None


@cache
def _subclass(multimodal: type[PreTrainedModel], with_vision: bool) -> type[PreTrainedModel]:
    members = {} if with_vision else {"base_model": property(_base_model), "get_output_embeddings": _head}

    def init(self: Any, config: PretrainedConfig, *arguments: Any, **named: Any) -> None:
        multimodal.__init__(self, config, *arguments, **named)
        if with_vision:
            self.decoder_path, _ = _find_decoder(self)
        else:
            _keep_language_model(self)

    members |= {"__init__": init, "__module__": multimodal.__module__, "__doc__": multimodal.__doc__}
    # the same name, by which transformers looks up how a checkpoint's tensors are renamed
    return type(multimodal.__name__, (multimodal,), members)


def _decoder(model: Any) -> Any:
    path = getattr(model, "language_model_path", None)
    return model.get_submodule(path) if path else None


def _base_model(model: Any) -> Any:
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


# Parameters keep their names in the whole model, so that weights load as usual and an adapter fits the whole model.
def _keep_language_model(model: Any) -> None:
    decoder_path, decoder = _find_decoder(model)
    parent_path = decoder_path.rpartition(".")[0]
    has_head = bool(decoder_path) and (_has_head(decoder) or (parent_path and hasattr(model, "lm_head")))
    if not has_head or not isinstance(decoder, PreTrainedModel):
        raise ValueError("its language model can't be separated from its other parts")
    model.language_model_path = decoder_path
    kept_names = _kept_modules(model)
    for path in {"", parent_path}:
        module = model.get_submodule(path)
        members = [*module.named_children(), *module.named_parameters(recurse=False), *module.named_buffers(recurse=False)]
        for child, _ in members:
            name = f"{path}.{child}" if path else child
            if not any(kept_name == name or kept_name.startswith(f"{name}.") for kept_name in kept_names):
                delattr(module, child)
    parent = model.get_submodule(parent_path)
    parent.forward = _text_forward(decoder, parent)


def _find_decoder(model: Any) -> tuple[str, Any]:
    candidates = (getattr(model, name, None) for name in ("language_model", "text_model"))
    decoder = next((part for part in candidates if part is not None), None)
    decoder = model.get_decoder() if decoder is None else decoder
    return next((name for name, module in model.named_modules() if module is decoder), ""), decoder


def _kept_modules(model: Any) -> list[str]:
    path = model.language_model_path
    return [path] if _has_head(_decoder(model)) else [path, "lm_head"]


def _text_forward(decoder: Any, parent: Any) -> Any:
    signature = inspect.signature(type(parent).forward)
    image_arguments = set(signature.parameters) - set(inspect.signature(decoder.forward).parameters) - _FOR_TEXT

    def forward(*arguments: Any, **named: Any) -> Any:
        bound = signature.bind(parent, *arguments).arguments | named
        text_arguments = {name: value for name, value in bound.items() if name not in image_arguments and value is not parent}
        output = decoder(**text_arguments)
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
