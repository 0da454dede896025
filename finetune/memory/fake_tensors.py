"""Context of a dry run: fake tensors on the CPU, CUDA's code paths, small tensors with values, short delta nets."""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from types import FunctionType
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor, unset_fake_temporarily
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_iter

from finetune.compat.bitsandbytes import own_quantisation_maps, replaced_int8_matmul
from finetune.compat.torch import cpu_autocast, fake_tensor_mode
from finetune.compat.transformers import fake_experts, replaced_kernels, without_packing_detection
from finetune.compat.trl import cuda_loss
from finetune.memory.rules import Capability
from finetune.model.hybrid import falls_back_to_torch

# A forecast must be the same on every machine and leave the GPU to the training process, and only CUDA builds of torch have
# CUDA tensors. So a dry run's fake tensors are on the CPU, and operators that work differently on CUDA are redirected.
#: Autocast computes these in fp32 on CUDA but not on a CPU (aten/src/ATen/autocast_mode.h, AT_FORALL_FP32).
_FP32_NAMES = (
    "acos asin cosh erfinv exp expm1 log log10 log2 log1p reciprocal rsqrt sinh tan pow __pow__ __rpow__ softplus layer_norm"
    " group_norm cosine_similarity dist cdist renorm logsumexp nll_loss kl_div l1_loss smooth_l1_loss huber_loss mse_loss"
)
#: On CUDA, autocast gives these an fp32 result without copying the 16-bit input to fp32 (AT_FORALL_FP32_SET_OPT_DTYPE).
_FP32_RESULT_NAMES = "softmax log_softmax sum prod cumsum cumprod"


def _functions_named(names: str) -> set[Callable[..., Any]]:
    owners = (torch, Tensor, F)
    return {getattr(owner, name) for name in names.split() for owner in owners if hasattr(owner, name)}


_FP32, _FP32_RESULT = _functions_named(_FP32_NAMES), _functions_named(_FP32_RESULT_NAMES)
_SOFTMAX = _functions_named("softmax")
#: One set to look up, because a step makes some ten thousand calls of other functions.
_REDIRECTED = {F.dropout, F.scaled_dot_product_attention, Tensor.__getitem__, *_FP32, *_FP32_RESULT, *_SOFTMAX}
_HALF = (torch.float16, torch.bfloat16)


@contextmanager
def card_semantics(trained_tokens: int) -> Iterator[CudaFunctions]:
    """Temporarily make CPU tensors take CUDA's code paths in torch, TRL, PEFT and bitsandbytes."""
    # a fake boolean mask has no values: it stands for `trained_tokens` selected positions
    with cpu_autocast(), cuda_loss(), replaced_int8_matmul(_int8_matmul), CudaFunctions(trained_tokens) as functions:
        yield functions


class CudaFunctions(TorchFunctionMode):
    """Redirection of single torch functions; the CPU's autocast handles other functions."""

    def __init__(self, trained_tokens: int) -> None:
        super().__init__()
        self.trained_tokens = trained_tokens

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func not in _REDIRECTED:
            return func(*args, **kwargs)
        if func is F.dropout:
            return _dropout(*args, **kwargs)
        if func is F.scaled_dot_product_attention:  # with dropout the CPU saves all scores, CUDA only a seed
            return func(*args, **{**kwargs, "dropout_p": 0.0})
        if func is Tensor.__getitem__ and type(args[1]) is FakeTensor and args[1].dtype is torch.bool:
            return _BooleanMask.apply(*args, self.trained_tokens)
        if torch.is_autocast_enabled("cpu"):
            if func in _FP32:
                args = tuple(_as_fp32(value) for value in args)
                kwargs = {name: _as_fp32(value) for name, value in kwargs.items()}
            elif func in _FP32_RESULT and _is_half(args[0]) and kwargs.get("dtype") is None:
                kwargs = {**kwargs, "dtype": torch.float32}
        # CUDA's fp32 softmax reads 16-bit scores directly
        if func in _SOFTMAX and _is_half(args[0]) and kwargs.get("dtype") is torch.float32:
            return torch._softmax(args[0], kwargs["dim"] if "dim" in kwargs else args[1], True)
        return func(*args, **kwargs)


class _BooleanMask(torch.autograd.Function):
    """`values[mask]` for a fake mask that stands for `count` selected positions."""

    @staticmethod
    def forward(ctx: Any, values: Tensor, mask: Tensor, count: int) -> Tensor:
        ctx.shape, ctx.dims = values.shape, mask.dim()
        ctx.save_for_backward(mask)
        positions = torch.empty((count, mask.dim()), dtype=torch.int64, device=values.device)  # nonzero(mask)
        selected = values.new_empty((count, *values.shape[mask.dim() :]))
        del positions
        return selected

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:  # type: ignore[override]
        count = grad.shape[0]
        # index_put with accumulation sorts the positions: a column per dimension, a linear index, both sorted (Indexing.cu).
        scratch = [grad.new_empty((count,), dtype=torch.int64) for _ in range(ctx.dims + 3)]
        values_grad = grad.new_zeros(ctx.shape)
        del scratch
        return values_grad, None, None


def _is_half(value: Any) -> bool:
    return isinstance(value, Tensor) and value.dtype in _HALF


def _as_fp32(value: Any) -> Any:
    return value.float() if _is_half(value) else value


def _dropout(values: Tensor, p: float = 0.5, training: bool = True, inplace: bool = False) -> Tensor:
    if not training or p == 0.0:
        return values
    # CUDA saves a bool mask (at::native_dropout); the CPU saves a mask in the values' dtype
    dropped = torch.native_dropout(values, p, True)[0]
    return values.copy_(dropped) if inplace else dropped


def _int8_matmul(a: Tensor, b: Tensor, out: Any = None, state: Any = None, threshold: float = 0.0, bias: Any = None) -> Any:
    # bitsandbytes' matmul for CUDA, which also runs on a CPU
    from bitsandbytes.autograd._functions import MatMul8bitLt, MatmulLtState

    state = state or MatmulLtState()
    state.threshold = threshold or state.threshold
    return MatMul8bitLt.apply(a, b, out, bias, state)


#: Chunks of a delta net's reference that a dry run computes; long rows have hundreds. The backward pass peaks in the third.
CHUNKS_RUN = 3
#: Elements of the largest tensor computed with values: a mask of 4,096 x 4,096 tokens.
MAX_ELEMENTS = 2**24
#: Operators that take masks as indices, so that the shape of their output depends on values.
_INDEXING = ("aten::index", "aten::index_put", "aten::index_put_")
#: Operators whose floating-point output is also computed: interpolated positions.
_RANGES = ("aten::arange", "aten::linspace")


@contextmanager
def fake_tensors(
    model: Any, capability: Capability | None, trained_tokens: int, packed: bool
) -> Iterator[CudaFunctions | None]:
    """Temporarily create fake tensors and run `model` as on a GPU of this compute capability, or on the CPU (None)."""
    is_card = capability is not None and sys.platform != "win32"
    with (
        own_quantisation_maps(),
        fake_experts(),
        replaced_kernels(model, functools.partial(_call_kernel, capability)),
        card_semantics(trained_tokens) if is_card else nullcontext() as semantics,
        nullcontext() if packed else without_packing_detection(),
        fake_tensor_mode(),
    ):
        yield semantics


def _call_kernel(capability: Capability | None, function: Any, closure: dict[str, Any], *args: Any, **kwargs: Any) -> Any:
    if closure["is_new_implementation"] and not falls_back_to_torch(closure["package"], capability):
        return function(*args, **kwargs)
    reference = function.__wrapped__
    if closure["func_name"] == "chunk_gated_delta_rule" and torch.is_autocast_enabled("cpu"):
        return _call_shortened(reference, *args, **kwargs)
    return reference(*args, **kwargs)


def _call_shortened(rule: Any, query: Any, key: Any, value: Any, *, chunk_size: int = 64, **kwargs: Any) -> Any:
    """Call a delta rule for its first chunks only; its initial state saves the other chunks' bytes."""
    rows, tokens, heads, value_dim = value.shape
    key_dim, chunks = key.shape[3], -(-tokens // chunk_size)
    if chunks > CHUNKS_RUN:
        # bytes that autograd saves for a chunk: the state in fp32; in bf16 the state twice, query, key, decayed key, twice the
        # new values, and the attention within the chunk
        chunk_bytes = 8 * key_dim * value_dim + 6 * chunk_size * key_dim + 4 * chunk_size * value_dim + 2 * chunk_size**2
        # the first chunk run saves its query and decayed key as well, because its state has a gradient
        saved_bytes = rows * heads * ((chunks - CHUNKS_RUN) * chunk_bytes - 4 * chunk_size * key_dim)
        kwargs["initial_state"] = _FirstState((rows, heads, key_dim, value_dim), saved_bytes)
        # a copy of the rule, whose `range` shortens the loop over chunks
        short = {"range": lambda *bounds: range(CHUNKS_RUN) if bounds in ((chunks,), (0, chunks)) else range(*bounds)}
        rule = FunctionType(rule.__code__, {**rule.__globals__, **short}, None, rule.__defaults__, rule.__closure__)
    return rule(query, key, value, chunk_size=chunk_size, **kwargs)


class _FirstState(NamedTuple):
    """A state of zeros, allocated when the rule converts its dtype: after the products of all chunks."""

    shape: tuple[int, ...]
    saved_bytes: int

    def to(self, values: Tensor) -> Tensor:
        state = values.new_zeros(self.shape)
        return _SaveBytes.apply(state, values, self.saved_bytes) if values.requires_grad else state


class _SaveBytes(torch.autograd.Function):
    """Save `size` bytes until the backward pass of `tensor`, which depends on `values`."""

    @staticmethod
    def forward(ctx: Any, tensor: Tensor, values: Tensor, size: int) -> Tensor:
        ctx.save_for_backward(torch.empty(size, dtype=torch.uint8))
        return tensor.view_as(tensor)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[None, None, None]:
        return None, None, None


# A vision tower splits its patches by image sizes, and a language model computes positions from token types, both in Python.
# Fake tensors lack these values. Weights stay fake.
class SmallValues(TorchDispatchMode):
    """Inside a fake tensor mode, compute small outputs of operators whose arguments have values."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        tensors = [leaf for leaf in tree_iter((args, kwargs)) if isinstance(leaf, Tensor)]
        if any(type(tensor) is FakeTensor or tensor.is_meta for tensor in tensors):
            if func.name().partition(".")[0] in _INDEXING:
                args = (args[0], _masks_to_positions(args[1]), *args[2:])
            return func(*args, **kwargs)
        are_small = sum(tensor.numel() for tensor in tensors) <= MAX_ELEMENTS
        needs_values = are_small if tensors else _creates_positions(func, args, kwargs)
        with unset_fake_temporarily() if needs_values else nullcontext():
            return func(*args, **kwargs)


def _masks_to_positions(indices: Any) -> list[Any]:
    positions: list[Any] = []
    for index in indices:
        if isinstance(index, Tensor) and type(index) is not FakeTensor and index.dtype is torch.bool:
            with unset_fake_temporarily():
                positions += index.nonzero(as_tuple=True)
        else:
            positions.append(index)
    return positions


def _creates_positions(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    out = func(*args, **kwargs)
    if not isinstance(out, Tensor) or out.is_meta or out.numel() > MAX_ELEMENTS:
        return False
    return not out.is_floating_point() or func.name().partition(".")[0] in _RANGES
