"""Triton's launcher, which a dry run replaces."""

import sys
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from importlib.util import find_spec
from typing import Any

from finetune.compat.patch_registry import PrivateName, replace, wrapped

_LAUNCH = "triton.runtime.jit.KernelInterface.__getitem__"
_L2_FLUSH = "triton.backends.nvidia.driver.CudaDriver.get_empty_cache_for_benchmark"
#: Read in triton 3.7.1; torch for the CPU comes without it.
PRIVATE_NAMES = (
    PrivateName(_LAUNCH, "patch", "a dry run has no GPU to compile for; every launcher inherits it", needs="fla-core"),
    PrivateName(_L2_FLUSH, "patch", "256 MiB more while kernels are tuned", "triton.testing.do_bench", "self", needs="a card"),
) * (find_spec("triton") is not None)


def fake_launches() -> AbstractContextManager[None]:
    """Inside, launching a Triton kernel with a fake tensor does nothing: Python code before it allocates the outputs."""
    return wrapped(_LAUNCH, _unless_fake) if "triton.runtime.jit" in sys.modules else nullcontext()


def _unless_fake(launcher: Callable[[Any, Any], Any], kernel: Any, grid: Any) -> Callable[..., Any]:
    from torch._subclasses.fake_tensor import FakeTensor

    def launch(*inputs: Any, **named: Any) -> Any:
        is_fake = any(isinstance(value, FakeTensor) for value in (*inputs, *named.values()))
        return None if is_fake else launcher(kernel, grid)(*inputs, **named)

    return launch


def tune_without_buffer() -> None:
    """Tune kernels without flushing the L2 cache, which takes a buffer of 256 MiB, until the process ends."""
    import torch

    replace(_L2_FLUSH, lambda driver: torch.empty(0, device="cuda"))
