"""Gradient checkpointing of decoder layers."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts
from transformers import PreTrainedModel
from transformers.modeling_layers import GradientCheckpointingLayer

from finetune.compat.transformers import wrap_checkpoint
from finetune.errors import RecipeError
from finetune.layers.offload import InOrder, Offload, SavedActivations

if TYPE_CHECKING:
    from finetune.settings import Settings


def base_of(model: nn.Module) -> PreTrainedModel:
    """Return the transformers model inside a PeftModel, or the model itself."""
    return model.get_base_model() if hasattr(model, "get_base_model") else model  # type: ignore[operator, return-value]


def decoder_layers(model: nn.Module) -> list[nn.Module]:
    """Return the decoder layers in order."""
    # a vision tower's layers are outside this path
    path = getattr(base_of(model), "decoder_path", "")
    decoder = base_of(model).get_submodule(path) if path else model
    # transformers' class of every layer that supports gradient checkpointing
    return [module for module in decoder.modules() if isinstance(module, GradientCheckpointingLayer)]


def outside_layers(model: nn.Module) -> list[nn.Module]:
    """Return the modules beside the stack of decoder layers, such as the final norm."""
    layers = set(decoder_layers(model))
    stacks = {module for module in model.modules() if isinstance(module, nn.ModuleList) and layers & set(module)}
    parents = [module for module in model.modules() if stacks & set(module.children())]
    return [module for parent in parents for module in parent.children() if module not in stacks]


def require_gradient(hidden: torch.Tensor) -> None:
    """Make the first layer's input require a gradient."""
    # nobody reads this gradient, but it joins all layers in one graph
    if torch.is_grad_enabled() and not hidden.requires_grad:
        hidden.requires_grad_()


def set_checkpointing(model: nn.Module, settings: Settings) -> None:
    """Turn gradient checkpointing of decoder layers on or off."""
    base, checkpointing = base_of(model), settings.activation_checkpointing
    base.disable_input_require_grads()  # enabling would add a second hook
    if checkpointing is False:
        base.activation_checkpointing_disable()
        return
    # reentrant: for DeepSpeed ZeRO-3; excludes `selective` and `offload`
    arguments: dict[str, Any] = {"use_reentrant": settings.launch.is_zero3}
    # no effect with eager attention, which has no attention kernel
    if checkpointing == "selective":
        arguments["context_fn"] = functools.partial(create_selective_checkpoint_contexts, keep_attention)
    try:
        base.activation_checkpointing_enable(arguments, settings.activation_checkpointing_every_n_layers)
    except ValueError as error:  # the few model types without gradient checkpointing
        raise RecipeError(f"activation_checkpointing: {error}", "Set activation_checkpointing=false.") from None
    # keeps the saved layer inputs in host memory; transformers' own `offload` pins memory even without a CUDA device
    if checkpointing == "offload" and not settings.torch_compile:
        checkpoint = functools.partial(_checkpoint_with_inputs_on_host, **arguments)
        for module in base.modules():
            wrap_checkpoint(module, lambda _: checkpoint)


def keep_attention(_context: Any, operation: Any, *_arguments: Any, **_named: Any) -> CheckpointPolicy:
    """Return the policy of selective checkpointing: save outputs of attention kernels."""
    name = operation.name()
    is_attention = "attention" in name or "attn" in name  # operators of aten, torch's varlen and flash-attn
    return CheckpointPolicy.MUST_SAVE if is_attention else CheckpointPolicy.PREFER_RECOMPUTE


def _checkpoint_with_inputs_on_host(function: Callable[..., Any], *inputs: Any, **arguments: Any) -> Any:
    # these hooks see only the layer's inputs: inside the layer the checkpoint's own hooks are active
    on_cuda = any(isinstance(value, torch.Tensor) and value.is_cuda for value in inputs)
    # copied on the compute stream: a layer's few inputs take little time
    with SavedActivations(Offload(InOrder(), pinned=on_cuda, window=0)):
        return checkpoint(function, *inputs, **arguments)
