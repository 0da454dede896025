"""Patches of bitsandbytes, as of 0.50.2."""

from __future__ import annotations

import functools
import importlib
import sys
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any

from finetune.compat import replace, wrap

_OPTIMIZER = "bitsandbytes.optim.optimizer.Optimizer8bit"


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
    # on a CPU another int8 matmul would be chosen, which saves other tensors
    return replace("bitsandbytes.matmul", function)


def without_cpu_repacking() -> AbstractContextManager[Any]:
    """Temporarily create 4-bit layers that are not repacked on a CPU."""
    # on a CPU with AVX512-BF16 the first evaluation would permanently repack bitsandbytes' Linear4bit for inference
    return replace("bitsandbytes.nn.modules.has_avx512bf16", lambda: False)


@contextmanager
def own_quantisation_maps() -> Iterator[None]:
    """Temporarily cache bitsandbytes' code books separately."""
    import torch

    with (
        # fake code books must not stay in the process, and computing real ones needs values
        replace("bitsandbytes.functional.name2qmap", {}),
        replace("bitsandbytes.functional.create_dynamic_map", lambda **_signs: torch.zeros(256)),
    ):
        yield


@contextmanager
def replaced_state_buffers(get_state_buffer: Callable[..., Any]) -> Iterator[None]:
    """Temporarily create optimizer states by `get_state_buffer(optimizer, parameter, dtype)`."""
    # paged states are outside torch's allocator, and prefetching has the driver move them
    with replace(f"{_OPTIMIZER}.get_state_buffer", get_state_buffer), replace(f"{_OPTIMIZER}.prefetch_state", lambda *_: None):
        yield
