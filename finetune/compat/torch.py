"""Undocumented names of torch that are patched, read or called."""

from __future__ import annotations

import contextlib
import functools
import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from typing import TYPE_CHECKING, Any

from finetune.compat.patch_registry import PrivateName, replaced

if TYPE_CHECKING:
    import torch


def _private(name: str, reason: str, used_by: str = "", needs: str = "") -> PrivateName:
    return PrivateName(name, "private call", reason, used_by, needs=needs)


#: Read in torch 2.13.0.
PRIVATE_NAMES = (
    PrivateName("torch.is_autocast_enabled", "patch",
                "PEFT asks without a device, which means CUDA; fake tensors are on the CPU",
                "peft.tuners.lora.bnb.Linear4bit.forward"),
    PrivateName("torch.optim.lr_scheduler.LRScheduler._last_lr", "attribute",
                "logged for the first step after the rate was lowered", "torch.optim.lr_scheduler.LRScheduler.get_last_lr"),
    PrivateName("torch._C._ensureCUDADeviceGuardSet", "patch",
                "adds 8 fake GPUs where torch is built for CUDA and sees none: autograd starts a thread for each, and can't be "
                "forked",
                "torch._subclasses.fake_tensor.FakeTensorMode.__enter__"),
    _private("torch.autograd.graph._engine_run_backward", "backward inside a TorchFunctionMode", "torch.autograd.backward"),
    _private("torch.ops.aten._scaled_dot_product_flash_attention_for_cpu", "its FLOPs are counted"),
    _private("torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward", "its FLOPs are counted"),
    _private("torch._softmax", "CUDA's softmax of 16-bit scores into fp32"),
    _private("torch._subclasses.fake_tensor.FakeTensor", "fake tensors, their device and mode"),
    _private("torch._subclasses.fake_tensor.FakeTensorMode", "the mode of fake tensors"),
    _private("torch._subclasses.fake_tensor.FakeTensorMode.cache_clear", "cleared with the forecast's own cache"),
    PrivateName("torch._subclasses.fake_tensor.FakeTensor.constant", "attribute",
                "data that an operator's output would depend on", "torch._subclasses.fake_tensor.FakeTensor.__new__"),
    PrivateName("torch._subclasses.fake_tensor.FakeTensor.fake_device", "attribute", "the device without a dispatch",
                "torch._subclasses.fake_tensor.FakeTensor.__new__"),
    PrivateName("torch.autograd.Function._backward_cls", "attribute", "whether the RMSNorm of this project made a tensor"),
    PrivateName("torch.nn.Module._forward_hooks", "attribute",
                "a layer with hooks keeps its ordinary forward, which calls them", "torch.nn.Module._call_impl"),
    PrivateName("torch.nn.Module._forward_pre_hooks", "attribute",
                "a layer with hooks keeps its ordinary forward, which calls them", "torch.nn.Module._call_impl"),
    _private("torch.utils._python_dispatch._disable_current_modes", "traces a layer, and copies one, outside of all modes"),
    PrivateName("torch._functorch.config.activation_memory_budget", "attribute",
                "share of its activations that a compiled layer keeps"),
    _private("torch._functorch.aot_autograd.aot_function", "a layer's forward and backward as the compiler splits them"),
    PrivateName("torch._dynamo.config.recompile_limit", "attribute",
                "how often a layer's code is compiled before it runs uncompiled"),
    _private("torch._dynamo.utils.counters", "counts graph breaks"),
    _private("torch._dynamo.utils.get_compilation_metrics", "what was compiled, how often and for how long"),
    _private("torch._dynamo.utils.clear_compilation_metrics", "what was compiled since"),
    _private("torch.fx.graph._BoxedCodeGen", "a graph that releases its inputs as it goes"),
    _private("torch._inductor.compile_fx.partition_fn", "the compiler's own choice of what is saved for backward"),
    _private("torch._inductor.decomposition.select_decomp_table", "the operators that the compiler's graphs consist of"),
    _private("torch._foreach_copy_", "casts all adapters of a layer in one kernel"),
    _private("torch.ops.aten._unsafe_view", "a result that autograd takes for no view: Gemma 3n changes it in place"),
    _private("torch._fused_rms_norm", "RMSNorm in one kernel on CUDA"),
    _private("torch.ops.aten._fused_rms_norm_backward", "its backward in one kernel"),
    _private("torch._subclasses.fake_tensor.unset_fake_temporarily", "computes with values inside a mode of fake tensors"),
    _private("torch.utils._python_dispatch.TorchDispatchMode", "sees every operator of the step"),
    _private("torch.utils._pytree.tree_iter", "tensors in an operator's outputs"),
    _private("torch._C._DisableTorchDispatch", "builds an output without shape inference"),
    _private("torch._C._dispatch_key_set", "compares a memoised output with torch's"),
    _private("torch.UntypedStorage._cdata", "identity of a storage"),
    _private("torch.Tensor._base", "whether a tensor is a view of a parameter"),
    _private("torch.Tensor._version", "whether a tensor was written to since it was saved"),
    PrivateName("torch.nn.Module._parameters", "attribute", "replaces parameters on meta without register_parameter's checks",
                "torch.nn.Module.__getattr__"),
    PrivateName("torch.nn.Module._buffers", "attribute", "replaces buffers on meta without register_buffer's checks",
                "torch.nn.Module.__getattr__"),
    _private("torch.cuda.memory._record_memory_history", "the allocator's history", needs="a card"),
    _private("torch.cuda.memory._dump_snapshot", "the allocator's history", needs="a card"),
    _private("torch.ops.aten._local_scalar_dense", "values that a trainer reads of fake tensors"),
    _private("torch.cuda.memory._snapshot", "the allocator's blocks after an out-of-memory error", needs="a card"),
)  # fmt: skip


@contextmanager
def cpu_autocast() -> Iterator[None]:
    """Inside, `torch.is_autocast_enabled` answers for the CPU."""
    import torch

    enabled = torch.is_autocast_enabled
    with replaced("torch.is_autocast_enabled", lambda device_type="cpu": enabled("cpu")):
        yield


@contextmanager
def fake_tensor_mode() -> Iterator[None]:
    """Inside, new tensors have no values; those with values can be used, too. No fake GPU is added, as ours are on the CPU."""
    from torch._subclasses.fake_tensor import FakeTensorMode

    with replaced("torch._C._ensureCUDADeviceGuardSet", lambda: None), FakeTensorMode(allow_non_fake_inputs=True):
        yield


def backward(loss: torch.Tensor) -> None:
    """`loss.backward()` inside a TorchFunctionMode, which the torch function would disable while it runs."""
    import torch
    from torch.autograd.graph import _engine_run_backward

    _engine_run_backward((loss,), (torch.ones_like(loss),), False, False, (), allow_unreachable=True, accumulate_grad=True)


def flop_counter() -> Any:
    """Counts the FLOPs of what runs inside it, also of attention on the CPU, for which torch has no formula: two products
    forward, and five backward."""
    import torch
    from torch.utils.flop_counter import FlopCounterMode

    def forward(query: Sequence[int], key: Sequence[int], value: Sequence[int], *_: Any, **__: Any) -> int:
        return 2 * math.prod(query[:-1]) * key[-2] * (query[-1] + value[-1])

    def backward(_: Sequence[int], *shapes: Any, **__: Any) -> float:
        return 2.5 * forward(*shapes)

    aten = torch.ops.aten
    formulas = {
        aten._scaled_dot_product_flash_attention_for_cpu: forward,
        aten._scaled_dot_product_flash_attention_for_cpu_backward: backward,
    }
    return FlopCounterMode(display=False, custom_mapping=formulas)


def with_values() -> contextlib.AbstractContextManager[Any]:
    """Inside, new tensors have values, also in a mode of fake tensors."""
    from torch._subclasses.fake_tensor import unset_fake_temporarily

    return unset_fake_temporarily()


def without_modes() -> contextlib.AbstractContextManager[Any]:
    """Inside, no mode sees the operators; fake tensors stay fake."""
    from torch.utils._python_dispatch import _disable_current_modes

    return _disable_current_modes()


def copy_all(targets: Any, sources: Any) -> None:
    """Copy each source to its target, which may have another dtype, in as few kernels as possible."""
    import torch

    torch._foreach_copy_(list(targets), list(sources))


def fused_rms_norm(x: Any, weight: Any, eps: float) -> Any:
    """RMSNorm over the last dimension in one kernel on CUDA, and the reciprocal of the root mean square in fp32."""
    import torch

    return torch._fused_rms_norm(x, [x.shape[-1]], weight, eps)


def fused_rms_norm_backward(grad: Any, x: Any, rstd: Any, weight: Any) -> Any:
    """Gradient of its x, in one kernel on CUDA. A processor has none."""
    import torch

    return torch.ops.aten._fused_rms_norm_backward(grad, x, [x.shape[-1]], rstd, weight, [True, False])[0]


def activation_budget(budget: float) -> contextlib.AbstractContextManager[Any]:
    """Inside, what is compiled keeps this share of the activations that the compiler would keep."""
    import torch._functorch.config as functorch

    return functorch.patch(activation_memory_budget=budget)


def set_activation_budget(budget: float) -> None:
    """Let what is compiled from now on keep this share of its activations, and be compiled for as many kinds of input as a
    run has: first and other layers, training and evaluation, one length and any."""
    import torch._dynamo.config as dynamo
    import torch._functorch.config as functorch

    functorch.activation_memory_budget = budget
    dynamo.recompile_limit = 64


@dataclass(frozen=True)
class Compilation:
    """A forward or backward graph that was compiled. `again`: a forward of code that had been, for another `reason`."""

    is_forward: bool
    is_recompile: bool
    seconds: float
    reason: str


def new_compilations() -> list[Compilation]:
    """What torch has compiled since the last call."""
    from torch._dynamo.utils import clear_compilation_metrics, get_compilation_metrics

    metrics = get_compilation_metrics()
    clear_compilation_metrics()
    return [
        Compilation(
            graph.is_forward is not False,
            graph.is_forward is not False and not str(graph.compile_id).endswith("/0"),
            graph.entire_frame_compile_time_s or 0.0,
            (graph.recompile_reason or "").strip(),
        )
        for graph in metrics
    ]


def graph_breaks() -> int:
    """How often a compiled layer's graph had to be broken so far."""
    from torch._dynamo.utils import counters

    return sum(counters["graph_break"].values())


def split_by_compiler(function: Callable[..., Any], fixed: list[int]) -> Callable[..., Any]:
    """`function` of tensors as torch.compile splits it: two graphs, run operator by operator. The first call traces it.

    `fixed`: arguments that stay where they are, the parameters. What one part saves for the other is chosen by inductor's
    partitioner, after its passes over the joint graph.
    """
    from torch._functorch.aot_autograd import aot_function
    from torch._inductor.compile_fx import partition_fn
    from torch._inductor.decomposition import select_decomp_table

    def split(joint: Any, inputs: Any, **options: Any) -> Any:
        return partition_fn(joint, inputs, **{**options, "static_lifetime_input_indices": fixed})

    return aot_function(
        function, fw_compiler=_uncompiled, bw_compiler=_uncompiled, partition_fn=split, decompositions=select_decomp_table()
    )


def _uncompiled(gm: Any, example_inputs: Any) -> Any:
    """The graph itself, called with a list that it empties, so that each input is released after its last use."""
    from torch.fx.graph import _BoxedCodeGen

    gm.graph.set_codegen(_BoxedCodeGen())
    gm.recompile()
    return gm


def silu_backward() -> Callable[..., torch.Tensor]:
    """Backward of SiLU: (grad, input, grad_input=where to write)."""
    import torch

    return torch.ops.aten.silu_backward.grad_input


def gelu_backward(approximate: str) -> Callable[..., torch.Tensor]:
    """Backward of GELU, `none` or `tanh`: (grad, input, grad_input=where to write)."""
    import torch

    return functools.partial(torch.ops.aten.gelu_backward.grad_input, approximate=approximate)


def has_forward_hooks(module: torch.nn.Module) -> bool:
    """Whether calling this module calls anything beside its forward."""
    return bool(module._forward_hooks or module._forward_pre_hooks)


def set_rates(schedule: Any, rate: float, rates: list[float]) -> None:
    """Continue a schedule with another base learning rate; `rates` are the groups' rates, logged for the next step."""
    schedule.base_lrs = [rate] * len(schedule.base_lrs)
    schedule._last_lr = rates


def record_memory_history(most_entries: int) -> None:
    """Record every allocation on the card with its stack from now on."""
    import torch

    torch.cuda.memory._record_memory_history(max_entries=most_entries)


def read_of_a_value() -> Any:
    """The operator that reads a tensor's only value, as `item()` does."""
    import torch

    return torch.ops.aten._local_scalar_dense.default


def dump_memory_history(path: str) -> None:
    """Write the recorded allocations to a file."""
    import torch

    torch.cuda.memory._dump_snapshot(path)


def memory_snapshot() -> dict[str, Any]:
    """The allocator's segments with their blocks, and the recorded allocations."""
    import torch

    return torch.cuda.memory._snapshot()


@cache
def varlen_shares_keys() -> bool:
    """Whether torch's variable-length attention supports grouped queries (`enable_gqa`, from 2.12 on)."""
    import inspect

    from torch.nn.attention.varlen import varlen_attn

    return "enable_gqa" in inspect.signature(varlen_attn).parameters
