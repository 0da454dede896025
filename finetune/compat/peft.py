"""Patches of PEFT, as of 0.21.2."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import TYPE_CHECKING, Any

from finetune.compat import replace, wrap

if TYPE_CHECKING:
    import torch

_DORA = "peft.tuners.lora.dora"
_WRAPPER = "peft.tuners.lora.layer.ParamWrapper"


@contextmanager
def dora_weights(dequantise: Callable[[Any], Any], copy_layer: Callable[[Any], Any]) -> Iterator[None]:
    """Temporarily let DoRA read weights by `dequantise(layer)` and copy layers by `copy_layer(layer)`."""
    # a forecast lacks dequantised weights, and has the layers' weights on meta or fake
    with replace(f"{_DORA}.dequantize_module_weight", dequantise), replace(f"{_DORA}.deepcopy", copy_layer):
        yield


def before_magnitudes(before: Callable[[Any], None]) -> AbstractContextManager[Any]:
    """Temporarily call `before(layer)` before DoRA computes magnitudes."""

    def update_after(update: Callable[..., None], self: Any, *, base_layer: Any, **kwargs: Any) -> None:
        before(base_layer)
        update(self, base_layer=base_layer, **kwargs)

    # the layer's weights may be offloaded
    return wrap(f"{_DORA}.DoraLinearLayer.update_layer", update_after)


def save_without_vocabulary() -> None:
    """Save adapters without asking the hub for the vocabulary."""
    # PEFT would compare the vocabulary's size with the hub's, to save whole embeddings if it differs
    replace("peft.utils.save_and_load.check_file_exists_on_hf_hub", lambda repo_id, filename, **_: False)


def leave_casts_to_autocast(model: Any) -> None:
    """Let LoRA layers cast inputs to the adapters' dtype only outside autocast."""
    from peft.tuners.lora import LoraLayer

    for module in model.modules():
        if isinstance(module, LoraLayer):
            module._cast_input_dtype = _cast_outside_autocast  # type: ignore[method-assign, assignment]


def _cast_outside_autocast(values: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    import torch

    # autocast undoes PEFT's cast to fp32, and each layer would then save a second 16-bit copy of its input
    return values if torch.is_autocast_enabled(values.device.type) else values.to(dtype)


def adapt_packed_parameters(logical_weight: Callable[[torch.Tensor], torch.Tensor]) -> None:
    """Let LoRA adapt 4-bit parameters, whose `lora_weights` are (A, B, scaling) of each adapter."""
    # `logical_weight` returns a tensor of the decoded weight's shape, dtype and device for a 4-bit parameter, others unchanged
    # PEFT reads the weight's shape and dtype, which codes lack, and adds the adapter's product to the weight
    wrap(f"{_WRAPPER}.get_param", lambda get_param, self: logical_weight(get_param(self)))

    @contextmanager
    def activate_beside_weight(activate: Callable[..., Any], self: Any, active_adapters: list[str]) -> Iterator[None]:
        parameter = type(self).get_param.original_function(self)
        if logical_weight(parameter) is parameter:  # not 4-bit
            with activate(self, active_adapters):
                yield
            return
        parameter.lora_weights = [
            (self.lora_A[name].weight, self.lora_B[name].weight, self.scaling[name])
            for name in active_adapters if name in self.lora_A
        ]  # fmt: skip
        try:
            yield
        finally:
            del parameter.lora_weights

    wrap(f"{_WRAPPER}._activate_lora", activate_beside_weight)
