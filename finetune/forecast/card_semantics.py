"""Makes tensors on the CPU take the paths of a CUDA device: autocast's lists, fused dropout and softmax, Triton tiles, int8.

Only a build of torch with CUDA knows CUDA tensors, and a forecast must come out the same everywhere and leave the GPU to
the training process. So a dry run's tensors are on the CPU, and the few places where a CPU computes otherwise are
redirected here while it lasts.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812
from torch.overrides import TorchFunctionMode

from finetune.compat.bitsandbytes import int8_matmul
from finetune.compat.torch import autocast_of_the_processor
from finetune.compat.trl import loss_of_a_card

#: Autocast computes these in fp32 on CUDA and not on a CPU (aten/src/ATen/autocast_mode.h, AT_FORALL_FP32).
_FP32_NAMES = (
    "acos asin cosh erfinv exp expm1 log log10 log2 log1p reciprocal rsqrt sinh tan pow __pow__ __rpow__ softplus layer_norm"
    " group_norm cosine_similarity dist cdist renorm logsumexp nll_loss kl_div l1_loss smooth_l1_loss huber_loss mse_loss"
)
#: These take the fp32 result type instead and read 16 bit directly (AT_FORALL_FP32_SET_OPT_DTYPE).
_FP32_RESULT_NAMES = "softmax log_softmax sum prod cumsum cumprod"


def _functions(names: str) -> set[Callable[..., Any]]:
    homes = (torch, torch.Tensor, F)
    return {getattr(home, name) for name in names.split() for home in homes if hasattr(home, name)}


_FP32, _FP32_RESULT, _SOFTMAX = _functions(_FP32_NAMES), _functions(_FP32_RESULT_NAMES), _functions("softmax")
#: All that is redirected; a step calls some ten thousand others.
_CONCERNED = {F.dropout, torch.Tensor.__getitem__} | _FP32 | _FP32_RESULT | _SOFTMAX
_HALF = (torch.float16, torch.bfloat16)


@contextmanager
def card_semantics(trained_tokens: int) -> Iterator[None]:
    """Within it, tensors on the CPU take the code paths of CUDA in torch, TRL, PEFT and bitsandbytes.

    `trained_tokens` is how many positions a boolean mask selects: those that the loss is computed on.
    """
    with autocast_of_the_processor(), loss_of_a_card(), int8_matmul(_int8_matmul), _CudaFunctions(trained_tokens):
        yield


class _CudaFunctions(TorchFunctionMode):
    """Redirects single functions of torch, while the CPU's own autocast does the rest of the bookkeeping."""

    def __init__(self, trained_tokens: int) -> None:
        super().__init__()
        self._trained_tokens = trained_tokens

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func not in _CONCERNED:
            return func(*args, **kwargs)
        if func is F.dropout:
            return _dropout(*args, **kwargs)
        if func is torch.Tensor.__getitem__ and isinstance(args[1], torch.Tensor) and args[1].dtype is torch.bool:
            return _Selected.apply(*args, self._trained_tokens)
        if torch.is_autocast_enabled("cpu"):
            if func in _FP32:
                args = tuple(_float(value) for value in args)
                kwargs = {name: _float(value) for name, value in kwargs.items()}
            elif func in _FP32_RESULT and _is_half(args[0]) and kwargs.get("dtype") is None:
                kwargs = {**kwargs, "dtype": torch.float32}
        if func in _SOFTMAX and _is_half(args[0]) and kwargs.get("dtype") is torch.float32:
            return torch._softmax(args[0], kwargs["dim"] if "dim" in kwargs else args[1], True)
        return func(*args, **kwargs)


class _Selected(torch.autograd.Function):
    """`values[mask]` when the number of selected positions is known and the mask has no data."""

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
        # index_put with accumulation sorts the positions: two columns of them, a linear index, both sorted (Indexing.cu).
        scratch = [grad.new_empty((count,), dtype=torch.int64) for _ in range(ctx.dims + 3)]
        full = grad.new_zeros(ctx.shape)
        del scratch
        return full, None, None


def _is_half(value: Any) -> bool:
    return isinstance(value, torch.Tensor) and value.dtype in _HALF


def _float(value: Any) -> Any:
    return value.float() if _is_half(value) else value


def _dropout(values: torch.Tensor, p: float = 0.5, training: bool = True, inplace: bool = False) -> torch.Tensor:
    """CUDA keeps a bool mask (at::native_dropout); a CPU keeps one of the values' dtype."""
    if not training or p == 0.0:
        return values
    dropped = torch.native_dropout(values, p, True)[0]
    return values.copy_(dropped) if inplace else dropped


def _int8_matmul(
    a: torch.Tensor, b: torch.Tensor, out: Any = None, state: Any = None, threshold: float = 0.0, bias: Any = None
) -> Any:
    """bitsandbytes' int8 matmul of a CUDA device, whatever the device."""
    from bitsandbytes.autograd._functions import MatMul8bitLt, MatmulLtState

    state = state or MatmulLtState()
    state.threshold = threshold or state.threshold
    return MatMul8bitLt.apply(a, b, out, bias, state)
