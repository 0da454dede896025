"""Names of torch behind its documented interface."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from typing import TYPE_CHECKING, Any

from finetune.compat.touched import Touched, replace, replaced

if TYPE_CHECKING:
    import torch

_READ_IN = "2.13.0"


def _called(name: str, reason: str, used_by: str = "", needs: str = "") -> Touched:
    return Touched(name, "private call", reason, _READ_IN, used_by, needs=needs)


TOUCHED = (
    Touched(
        "torch.is_autocast_enabled", "patch", "PEFT asks without a device, which means CUDA; fake tensors are on the CPU",
        _READ_IN, "peft.tuners.lora.bnb.Linear4bit.forward",
    ),
    Touched(
        "torch.compile", "patch", "bitsandbytes compiles two functions when it is imported; the doctor needs neither",
        _READ_IN, "bitsandbytes.backends.default.ops._try_torch_compile",
    ),
    Touched(
        "torch.optim.lr_scheduler.LRScheduler._last_lr", "attribute", "what the first step after a lowered rate is logged with",
        _READ_IN, "torch.optim.lr_scheduler.LRScheduler.get_last_lr",
    ),
    _called("torch.autograd.graph._engine_run_backward", "backward inside a TorchFunctionMode", "torch.autograd.backward"),
    _called("torch._softmax", "CUDA's softmax of 16-bit scores into fp32"),
    _called("torch._subclasses.fake_tensor.FakeTensor", "tensors without data, their device and mode"),
    _called("torch._subclasses.fake_tensor.FakeTensorMode", "tensors without data; its cache is emptied"),
    _called("torch._subclasses.fake_tensor.FakeTensorMode.cache_clear", "its cache is emptied with the forecast's own"),
    Touched(
        "torch._subclasses.fake_tensor.FakeTensor.constant", "attribute", "data that an operator's result would depend on",
        _READ_IN, "torch._subclasses.fake_tensor.FakeTensor.__new__",
    ),
    Touched(
        "torch._subclasses.fake_tensor.FakeTensor.fake_device", "attribute", "the device without a question to the dispatcher",
        _READ_IN, "torch._subclasses.fake_tensor.FakeTensor.__new__",
    ),
    _called("torch.utils._python_dispatch.TorchDispatchMode", "sees every operator of the step"),
    _called("torch.utils._pytree.tree_iter", "tensors in an operator's results"),
    _called("torch._C._DisableTorchDispatch", "builds a result without asking what it looks like"),
    _called("torch._C._dispatch_key_set", "compares a built result with the one torch made"),
    _called("torch.UntypedStorage._cdata", "identity of a storage"),
    _called("torch.Tensor._base", "whether a tensor is a view of a parameter"),
    _called("torch.Tensor._version", "whether a tensor was written to since it was kept"),
    Touched(
        "torch.nn.Module._parameters", "attribute", "replaces parameters on meta without register_parameter's checks",
        _READ_IN, "torch.nn.Module.__getattr__",
    ),
    Touched(
        "torch.nn.Module._buffers", "attribute", "replaces buffers on meta without register_buffer's checks",
        _READ_IN, "torch.nn.Module.__getattr__",
    ),
    _called("torch.cuda.memory._record_memory_history", "the allocator's history", needs="a card"),
    _called("torch.cuda.memory._dump_snapshot", "the allocator's history", needs="a card"),
)  # fmt: skip


@contextmanager
def autocast_of_the_processor() -> Iterator[None]:
    """A question about autocast without a device is about the CPU's."""
    import torch

    enabled = torch.is_autocast_enabled
    with replaced("torch.is_autocast_enabled", lambda device_type="cpu": enabled("cpu")):
        yield


def do_without_compiler() -> None:
    """torch.compile gives functions back as they are, from now on: for a process that imports bitsandbytes and calls little."""
    replace("torch.compile", _as_it_is)


def _as_it_is(function: Any = None, **_: Any) -> Any:
    return (lambda same: same) if function is None else function


def backward(loss: torch.Tensor) -> None:
    """`loss.backward()`, which as a function of torch would leave a TorchFunctionMode while it runs."""
    import torch
    from torch.autograd.graph import _engine_run_backward

    _engine_run_backward((loss,), (torch.ones_like(loss),), False, False, (), allow_unreachable=True, accumulate_grad=True)


def set_rates(schedule: Any, rate: float, rates: list[float]) -> None:
    """Continue a schedule with another base learning rate; `rates` of the groups are what the next step is logged with."""
    schedule.base_lrs = [rate] * len(schedule.base_lrs)
    schedule._last_lr = rates


def record_memory_history(most_entries: int) -> None:
    """Keep every allocation of the card with its stack from now on."""
    import torch

    torch.cuda.memory._record_memory_history(max_entries=most_entries)


def dump_memory_history(path: str) -> None:
    """Write what `record_memory_history` has kept."""
    import torch

    torch.cuda.memory._dump_snapshot(path)


@cache
def varlen_shares_keys() -> bool:
    """Whether torch's variable-length attention takes fewer heads of keys than of queries: from 2.12 on, when asked to."""
    import inspect

    from torch.nn.attention.varlen import varlen_attn

    return "enable_gqa" in inspect.signature(varlen_attn).parameters
