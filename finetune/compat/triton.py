"""Private names of Triton."""

import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from importlib.util import find_spec
from types import SimpleNamespace
from typing import Any

from finetune.compat.patch_registry import PrivateName, replace, wrap

_LAUNCH = "triton.runtime.jit.KernelInterface.__getitem__"
_DEVICE, _PROPERTIES = "torch.cuda.device", "torch.cuda.get_device_properties"
_L2_FLUSH = "triton.backends.nvidia.driver.CudaDriver.get_empty_cache_for_benchmark"
#: Read in triton 3.7.1; torch for the CPU comes without it.
PRIVATE_NAMES = (
    PrivateName(_LAUNCH, "patch", "a dry run has no GPU to compile for; every launcher inherits it", needs="fla-core"),
    PrivateName(_L2_FLUSH, "patch", "256 MiB more while kernels are tuned", "triton.testing.do_bench", "self", needs="a card"),
) * (find_spec("triton") is not None) + (
    PrivateName(_DEVICE, "patch", "mamba-ssm makes a fake tensor's device the current one", needs="mamba-ssm"),
    PrivateName(_PROPERTIES, "patch", "mamba-ssm counts multiprocessors", needs="mamba-ssm"),
)


@contextmanager
def fake_launches() -> Iterator[None]:
    """Temporarily skip launches of Triton kernels with fake tensors."""
    with ExitStack() as stack:
        if "triton.runtime.jit" in sys.modules:
            stack.enter_context(wrap(_LAUNCH, _unless_fake))
        if "mamba_ssm" in sys.modules:
            stack.enter_context(replace(_DEVICE, lambda index: nullcontext()))
            # an RTX 4090's: mamba-ssm takes two buffers of 16 MiB in Granite 4 H micro, 2,048 tokens; of 10 MiB by a 3090's 82
            card = SimpleNamespace(multi_processor_count=128)
            stack.enter_context(replace(_PROPERTIES, lambda device: card))
        yield


def _unless_fake(launcher: Callable[[Any, Any], Any], kernel: Any, grid: Any) -> Callable[..., Any]:
    from torch._subclasses.fake_tensor import FakeTensor

    def launch(*inputs: Any, **named: Any) -> Any:
        if not any(isinstance(value, FakeTensor) for value in (*inputs, *named.values())):
            return launcher(kernel, grid)(*inputs, **named)
        if configs := getattr(kernel, "configs", None):
            # the Python code before the launch has allocated the outputs
            kernel.best_config = configs[0]  # mamba-ssm reads the tile of a kernel that was tuned
        return None

    return launch


def tune_without_buffer() -> None:
    """Tune kernels without flushing the L2 cache until the process ends."""
    import torch

    # flushing takes a buffer of 256 MiB
    replace(_L2_FLUSH, lambda driver: torch.empty(0, device="cuda"))
