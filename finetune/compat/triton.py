"""Triton's launcher, which a dry run replaces."""

import sys
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from importlib.util import find_spec
from typing import Any

from finetune.compat.patch_registry import PrivateName, wrapped

#: torch for the CPU comes without it.
TRITON_INSTALLED = find_spec("triton") is not None
_LAUNCH = "triton.runtime.jit.KernelInterface.__getitem__"
_REASON = "a dry run has no GPU to compile for; every launcher inherits it"
#: Read in triton 3.7.1.
PRIVATE_NAMES = (PrivateName(_LAUNCH, "patch", _REASON, needs="fla-core"),) * TRITON_INSTALLED


def fake_launches() -> AbstractContextManager[None]:
    """Inside, launching a Triton kernel with a fake tensor does nothing: Python code before it allocates the outputs."""
    return wrapped(_LAUNCH, _unless_fake) if "triton.runtime.jit" in sys.modules else nullcontext()


def _unless_fake(launcher: Callable[[Any, Any], Any], kernel: Any, grid: Any) -> Callable[..., Any]:
    from torch._subclasses.fake_tensor import FakeTensor

    def launch(*inputs: Any, **named: Any) -> Any:
        is_fake = any(isinstance(value, FakeTensor) for value in (*inputs, *named.values()))
        return None if is_fake else launcher(kernel, grid)(*inputs, **named)

    return launch
