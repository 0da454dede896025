"""Patches of torch, as of 2.13.0."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from functools import cache
from typing import TYPE_CHECKING, Any

from finetune.compat import replace, wrap
from finetune.compat.triton import fake_launches

if TYPE_CHECKING:
    import torch

#: Attributes of a new fake tensor, by device.
_FAKE_STATES: dict[torch.device, dict[str, Any]] = {}


@contextmanager
def cpu_autocast() -> Iterator[None]:
    """Temporarily redirect CUDA's autocast to the CPU's."""
    import torch

    def autocast(original: Any, *_: Any, enabled: bool, **__: Any) -> Any:
        return original("cpu", torch.get_autocast_dtype("cpu"), enabled)

    # PEFT asks without a device, which means CUDA, and fla's backward runs in CUDA's autocast; a dry run is on the CPU
    redirected_query = wrap("torch.is_autocast_enabled", lambda original, device_type="cpu": original("cpu"))
    with redirected_query, wrap("torch.amp.autocast_mode.autocast", autocast):
        yield


@contextmanager
def fake_tensor_mode() -> Iterator[None]:
    """Temporarily create new tensors without values, on the CPU."""
    from torch._subclasses.fake_tensor import FakeTensorMode

    # it adds 8 fake GPUs to a CUDA build that sees none: autograd starts a thread for each, and can't be forked
    guard = replace("torch._C._ensureCUDADeviceGuardSet", lambda: None)
    # tensors with values can still be used
    with guard, fake_launches(), FakeTensorMode(allow_non_fake_inputs=True):
        yield


def backward(loss: torch.Tensor) -> None:
    """Run `loss.backward()` inside a TorchFunctionMode."""
    import torch
    from torch.autograd.graph import _engine_run_backward

    # torch's own `backward` would disable the mode
    _engine_run_backward((loss,), (torch.ones_like(loss),), False, False, (), allow_unreachable=True, accumulate_grad=True)


#: Share of an uncompiled layer's activations that a compiled layer saves: elementwise operators are recomputed, matrix products
#: are not.
ACTIVATION_BUDGET = 0.8


def set_compiler() -> None:
    """Configure torch's compiler for decoder layers."""
    import torch._dynamo.config as dynamo
    import torch._functorch.config as functorch
    import torch._inductor.config as inductor

    functorch.activation_memory_budget = ACTIVATION_BUDGET
    inductor.size_asserts = inductor.alignment_asserts = False  # checks of each operator's outputs in each call
    functorch.autograd_cache_allow_custom_autograd_functions = True  # bitsandbytes' product
    # a layer that can't be recompiled for unexpected inputs runs uncompiled
    dynamo.suppress_errors = True
    dynamo.recompile_limit = 64  # layers recompile for training, the reference model's pass, and recomputation


def call_bodies(bodies: dict[Any, Callable[..., Any]]) -> None:
    """Let compiled code call these operators' Python bodies without the dispatcher, which takes a third of their host time."""
    from torch._inductor.ir import FallbackKernel
    from torch._inductor.lowering import constrain_to_fake_tensors, lowerings, make_fallback
    from torch._inductor.select_algorithm import extern_kernels
    from torch._inductor.virtualized import V

    def lowering(call: Callable[..., Any], name: str) -> Callable[..., Any]:
        def lower(*inputs: Any) -> Any:
            out = call(*inputs)
            kernel = [step for step in V.graph.operations if isinstance(step, FallbackKernel)][-1]
            # generated code calls this function instead of the operator
            kernel.python_kernel_name = f"extern_kernels.{name}"
            return out

        return lower

    for operator, body in bodies.items():
        name = f"finetune_{body.__name__}"
        setattr(extern_kernels, name, body)
        make_fallback(operator, layout_constraint=constrain_to_fake_tensors, override_decomp=True)
        lowerings[operator] = lowering(lowerings[operator], name)


def fake_tensor(mode: Any, values: torch.Tensor, device: Any) -> Any:
    """Return FakeTensor(mode, values, device), in a fraction of the constructor's time."""
    import torch
    from torch._subclasses.fake_tensor import FakeTensor

    if device not in _FAKE_STATES:
        state = vars(FakeTensor(mode, values, device))
        _FAKE_STATES[device] = {name: value for name, value in state.items() if name != "fake_mode"}
    tensor = torch.Tensor._make_subclass(FakeTensor, values, False, dispatch_device=True, device_for_backend_keys=device)
    vars(tensor).update(_FAKE_STATES[device], fake_mode=mode)
    return tensor


def raising_compiler_errors() -> AbstractContextManager[Any]:
    """Temporarily raise the compiler's errors."""
    import torch._dynamo.config as dynamo

    return dynamo.patch(suppress_errors=False)


#: (context, operator) -> CheckpointPolicy.
RecomputePolicy = Callable[[Any, Any], Any]


def split_by_compiler(
    function: Callable[..., Any], parameter_indices: list[int], policy: RecomputePolicy | None, to_callable: Callable[..., Any]
) -> Callable[..., Any]:
    """Split `function` into forward and backward graphs like torch.compile."""
    from torch._functorch.aot_autograd import aot_function
    from torch._functorch.partitioners import min_cut_rematerialization_partition
    from torch._inductor.decomposition import select_decomp_table

    # Inductor's partitioner chooses the saved tensors. `policy`: selective checkpointing, by which Dynamo tags operators.
    def split(joint: Any, inputs: Any, **options: Any) -> Any:
        for node in joint.graph.nodes:
            if policy and node.meta.get("partitioner_tag") == "is_forward" and hasattr(node.target, "name"):
                node.meta |= {"recompute": policy(None, node.target), "ac_graph_id": 0}
        options["static_lifetime_input_indices"] = parameter_indices
        return min_cut_rematerialization_partition(joint, inputs, "inductor", **options)

    # the first call traces `function`
    return aot_function(
        function, fw_compiler=lambda graph, _: to_callable(graph), bw_compiler=lambda graph, _: to_callable(graph),
        partition_fn=split, decompositions=select_decomp_table(),
    )  # fmt: skip


@cache
def varlen_shares_keys() -> bool:
    """Tell whether varlen attention supports grouped queries."""
    import inspect

    from torch.nn.attention.varlen import varlen_attn

    # from torch 2.12 on
    return "enable_gqa" in inspect.signature(varlen_attn).parameters
