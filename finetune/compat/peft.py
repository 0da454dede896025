"""Undocumented names of PEFT that are patched or set."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from finetune.compat.touched import Touched, replaced

if TYPE_CHECKING:
    import torch

_READ_IN = "0.21.2"
_DORA = "peft.tuners.lora.dora"
_LAYER = "peft.tuners.tuners_utils.BaseTunerLayer"

TOUCHED = (
    Touched(
        f"{_DORA}.dequantize_module_weight", "patch", "DoRA reads the dequantised weights, which a forecast does not have",
        _READ_IN, f"{_DORA}.DoraLinearLayer.forward", "module",
    ),
    Touched(
        f"{_DORA}.deepcopy", "patch", "DoRA copies the quantised layer, whose weights are on meta",
        _READ_IN, f"{_DORA}.DoraLinearLayer.update_layer",
    ),
    Touched(
        f"{_LAYER}._cast_input_dtype", "attribute", "casts every input to fp32, which autocast casts back, to a second copy",
        _READ_IN, "peft.tuners.lora.layer.Linear.forward", "self x dtype",
    ),
)  # fmt: skip


@contextmanager
def dora_weights(dequantised: Callable[[Any], Any]) -> Iterator[None]:
    """Inside, DoRA gets the weights of a layer from `dequantised(layer)` and copies no layer."""
    with replaced(f"{_DORA}.dequantize_module_weight", dequantised), replaced(f"{_DORA}.deepcopy", lambda module: module):
        yield


def leave_casts_to_autocast(model: Any) -> None:
    """Make LoRA layers cast their inputs to the adapters' dtype only outside autocast.

    Autocast computes in 16 bit whatever PEFT has cast: with PEFT's cast, each layer keeps a 16-bit copy of its input for
    backward, equal to the input that the base layer keeps.
    """
    from peft.tuners.lora import LoraLayer

    for module in model.modules():
        if isinstance(module, LoraLayer):
            module._cast_input_dtype = _cast_outside_autocast  # type: ignore[method-assign, assignment]


def _cast_outside_autocast(values: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    import torch

    return values if torch.is_autocast_enabled(values.device.type) else values.to(dtype)
