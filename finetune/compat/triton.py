"""Patches of Triton, as of 3.7.1."""

import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from types import SimpleNamespace
from typing import Any

from finetune.compat.patch_registry import replace, wrap

_L2_FLUSH = "triton.backends.nvidia.driver.CudaDriver.get_empty_cache_for_benchmark"


@contextmanager
def fake_launches() -> Iterator[None]:
    """Temporarily skip launches of Triton kernels with fake tensors."""
    with ExitStack() as stack:
        if "triton.runtime.jit" in sys.modules:
            # every launcher inherits it
            stack.enter_context(wrap("triton.runtime.jit.KernelInterface.__getitem__", _unless_fake))
        if "mamba_ssm" in sys.modules:
            stack.enter_context(replace("torch.cuda.device", lambda index: nullcontext()))
            # as an RTX 4090, which gives mamba-ssm two buffers of 16 MiB in Granite 4 H micro (2,048 tokens); an RTX 3090, with
            # 82 multiprocessors, gives 10 MiB
            properties = SimpleNamespace(multi_processor_count=128)
            stack.enter_context(replace("torch.cuda.get_device_properties", lambda device: properties))
        yield


def _unless_fake(launcher: Callable[[Any, Any], Any], kernel: Any, grid: Any) -> Callable[..., Any]:
    from torch._subclasses.fake_tensor import FakeTensor

    def launch(*args: Any, **kwargs: Any) -> Any:
        if not any(isinstance(value, FakeTensor) for value in (*args, *kwargs.values())):
            return launcher(kernel, grid)(*args, **kwargs)
        # nothing to compute: the Python code before the launch has allocated the outputs
        if configs := getattr(kernel, "configs", None):
            kernel.best_config = configs[0]  # mamba-ssm reads the tile size of a tuned kernel
        return None

    return launch


def tune_without_buffer() -> None:
    """Tune kernels without flushing the L2 cache until the process ends."""
    import torch

    # flushing would allocate 256 MiB
    replace(_L2_FLUSH, lambda driver: torch.empty(0, device="cuda"))
