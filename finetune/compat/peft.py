"""Undocumented names of PEFT that are patched."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from finetune.compat.touched import Touched, replaced

_READ_IN = "0.21.2"
_DORA = "peft.tuners.lora.dora"

TOUCHED = (
    Touched(
        f"{_DORA}.dequantize_module_weight", "patch", "DoRA reads the dequantised weights, which a forecast does not have",
        _READ_IN, f"{_DORA}.DoraLinearLayer.forward", "module",
    ),
    Touched(
        f"{_DORA}.deepcopy", "patch", "DoRA copies the quantised layer, whose weights are on meta",
        _READ_IN, f"{_DORA}.DoraLinearLayer.update_layer",
    ),
)  # fmt: skip


@contextmanager
def dora_weights(dequantised: Callable[[Any], Any]) -> Iterator[None]:
    """Inside, DoRA gets the weights of a layer from `dequantised(layer)` and copies no layer."""
    with replaced(f"{_DORA}.dequantize_module_weight", dequantised), replaced(f"{_DORA}.deepcopy", lambda module: module):
        yield
