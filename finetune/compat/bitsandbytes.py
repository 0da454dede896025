"""Private names of bitsandbytes."""

from __future__ import annotations

import functools
import importlib
import sys
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any

from finetune.compat.patch_registry import PrivateName, replace, wrap

_OPTIMIZER = "bitsandbytes.optim.optimizer.Optimizer8bit"

#: Read in bitsandbytes 0.50.2.
PRIVATE_NAMES = (
    PrivateName("torch.compile", "patch", "bitsandbytes compiles functions when it is imported, which imports the compiler",
                "bitsandbytes.backends.default.ops._try_torch_compile"),
    PrivateName("bitsandbytes.matmul", "patch", "on a CPU another int8 matmul would be chosen, which saves other tensors",
                "bitsandbytes.nn.modules.Linear8bitLt.forward", "A B out state threshold bias"),
    PrivateName("bitsandbytes.nn.modules.has_avx512bf16", "patch", "weights packed for such a CPU would change a forecast",
                "bitsandbytes.nn.modules.Linear4bit.__init__", ""),
    PrivateName("bitsandbytes.functional.name2qmap", "patch", "code books are cached for the process; fake ones must not stay",
                "bitsandbytes.functional.quantize_blockwise"),
    PrivateName("bitsandbytes.functional.create_dynamic_map", "patch", "it computes on values, which fake tensors do not have",
                "bitsandbytes.functional.quantize_blockwise", "signed max_exponent_bits total_bits"),
    PrivateName(f"{_OPTIMIZER}.get_state_buffer", "patch", "paged states are outside torch's allocator",
                "bitsandbytes.optim.optimizer.Optimizer2State.init_state", "self p dtype"),
    PrivateName(f"{_OPTIMIZER}.prefetch_state", "patch", "has the driver move paged states", f"{_OPTIMIZER}.step", "self p"),
    PrivateName("bitsandbytes.nn.Linear4bit.support_avx512bf16_for_cpu", "attribute",
                "the first evaluation would repack the weights for inference, and nothing undoes it",
                "bitsandbytes.nn.Linear4bit.forward"),
    PrivateName("bitsandbytes.autograd._functions.MatMul8bitLt", "private call", "the int8 matmul of a card",
                "bitsandbytes.autograd._functions.matmul"),
)  # fmt: skip


def import_without_compiler() -> None:
    """Import bitsandbytes without torch's compiler."""
    # effective only before any other import of bitsandbytes
    if "bitsandbytes" in sys.modules:
        return
    # it decorates four functions with torch.compile, which imports the compiler: a second of each start
    with wrap("torch.compile", _compile_when_called):
        importlib.import_module("bitsandbytes")


def _compile_when_called(compile_now: Callable[..., Any], function: Callable[..., Any], **options: Any) -> Callable[..., Any]:
    compiled = functools.cache(lambda: compile_now(function, **options))
    return functools.wraps(function)(lambda *args, **kwargs: compiled()(*args, **kwargs))


def replaced_int8_matmul(function: Callable[..., Any]) -> AbstractContextManager[Any]:
    """Temporarily call `function` for the matmul of int8 layers."""
    return replace("bitsandbytes.matmul", function)


def without_cpu_repacking() -> AbstractContextManager[Any]:
    """Temporarily create 4-bit layers that are not repacked on a CPU."""
    return replace("bitsandbytes.nn.modules.has_avx512bf16", lambda: False)


def disable_cpu_repacking(model: Any, *, only_failing: bool = False) -> None:
    """Disable CPU repacking of a model's 4-bit layers, or only of layers where it would fail."""
    from bitsandbytes.nn import Linear4bit

    for module in model.modules():
        if isinstance(module, Linear4bit):
            # bitsandbytes' `_convert_weight_packed_for_cpu` needs multiples of 32 rows and 64 columns
            fails = module.out_features % 32 or module.in_features % 64
            if fails or not only_failing:
                module.support_avx512bf16_for_cpu = False


@contextmanager
def own_quantisation_maps() -> Iterator[None]:
    """Temporarily cache bitsandbytes' code books separately."""
    import torch

    with (
        # fake code books must not stay in the process
        replace("bitsandbytes.functional.name2qmap", {}),
        replace("bitsandbytes.functional.create_dynamic_map", lambda **_signs: torch.zeros(256)),
    ):
        yield


@contextmanager
def replaced_state_buffers(get_state_buffer: Callable[..., Any]) -> Iterator[None]:
    """Temporarily create optimizer states by `get_state_buffer(optimizer, parameter, dtype)`."""
    with replace(f"{_OPTIMIZER}.get_state_buffer", get_state_buffer), replace(f"{_OPTIMIZER}.prefetch_state", lambda *_: None):
        yield
