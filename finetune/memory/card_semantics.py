"""CUDA's code paths for CPU tensors: autocast's operator lists, fused dropout and softmax, Triton tiles, int8 matmuls."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812
from torch._subclasses.fake_tensor import FakeTensor
from torch.overrides import TorchFunctionMode

from finetune.compat.bitsandbytes import replaced_int8_matmul
from finetune.compat.torch import cpu_autocast
from finetune.compat.trl import cuda_loss

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
    owners = (torch, torch.Tensor, F)
    return {getattr(owner, name) for name in names.split() for owner in owners if hasattr(owner, name)}


_FP32, _FP32_RESULT = _functions_named(_FP32_NAMES), _functions_named(_FP32_RESULT_NAMES)
_SOFTMAX = _functions_named("softmax")
#: One set to look up, because a step makes some ten thousand calls of other functions.
_REDIRECTED = {F.dropout, F.scaled_dot_product_attention, torch.Tensor.__getitem__, *_FP32, *_FP32_RESULT, *_SOFTMAX}
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
        if func is torch.Tensor.__getitem__ and type(args[1]) is FakeTensor and args[1].dtype is torch.bool:
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
    def forward(ctx: Any, values: torch.Tensor, mask: torch.Tensor, count: int) -> torch.Tensor:
        ctx.shape, ctx.dims = values.shape, mask.dim()
        ctx.save_for_backward(mask)
        positions = torch.empty((count, mask.dim()), dtype=torch.int64, device=values.device)  # nonzero(mask)
        selected = values.new_empty((count, *values.shape[mask.dim() :]))
        del positions
        return selected

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> Any:  # type: ignore[override]
        count = grad.shape[0]
        # index_put with accumulation sorts the positions: a column per dimension, a linear index, both sorted (Indexing.cu).
        scratch = [grad.new_empty((count,), dtype=torch.int64) for _ in range(ctx.dims + 3)]
        values_grad = grad.new_zeros(ctx.shape)
        del scratch
        return values_grad, None, None


def _is_half(value: Any) -> bool:
    return isinstance(value, torch.Tensor) and value.dtype in _HALF


def _as_fp32(value: Any) -> Any:
    return value.float() if _is_half(value) else value


def _dropout(values: torch.Tensor, p: float = 0.5, training: bool = True, inplace: bool = False) -> torch.Tensor:
    if not training or p == 0.0:
        return values
    # CUDA saves a bool mask (at::native_dropout); the CPU saves a mask in the values' dtype
    dropped = torch.native_dropout(values, p, True)[0]
    return values.copy_(dropped) if inplace else dropped


def _int8_matmul(
    a: torch.Tensor, b: torch.Tensor, out: Any = None, state: Any = None, threshold: float = 0.0, bias: Any = None
) -> Any:
    # bitsandbytes' matmul for CUDA, which also runs on a CPU
    from bitsandbytes.autograd._functions import MatMul8bitLt, MatmulLtState

    state = state or MatmulLtState()
    state.threshold = threshold or state.threshold
    return MatMul8bitLt.apply(a, b, out, bias, state)
