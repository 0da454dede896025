"""Rotary position embedding (RoPE; Su et al., 2021, arXiv 2104.09864) as one autograd function, for lean layers.

In transformers it is a function in each model's file, of twice as many operators, which attention calls by its name. A function
that is tried and found to be RoPE is replaced: the attention gets its class's forward with this one under that name.
"""

from __future__ import annotations

from collections.abc import Callable
from types import FunctionType
from typing import Any

import torch
from torch.autograd.function import once_differentiable

#: The name under which attention calls it, and the parameters that it may have.
_NAME = "apply_rotary_pos_emb"
_PAIR, _SINGLE = ("q", "k", "cos", "sin", "unsqueeze_dim"), ("x", "cos", "sin", "unsqueeze_dim")
_HEAD = 8


class Rotary(torch.autograd.Function):
    """x * cos + rotate_half(x) * sin for `x` (batch, heads, tokens, head) or (batch, tokens, heads, head), and cos and sin that
    broadcast to it but for the last dimension: what x has beyond theirs is copied. Keeps cos and sin."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
        """The rotated x, in its dtype, which is also that of cos and sin."""
        ctx.save_for_backward(cos, sin)
        return _rotated(x, cos, sin.chunk(2, -1), 1.0)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: torch.Tensor) -> Any:
        """Gradient of x: the rotation back."""
        cos, sin = ctx.saved_tensors
        return _rotated(grad, cos, sin.chunk(2, -1)[::-1], -1.0), None, None


def _rotated(x: torch.Tensor, cos: torch.Tensor, sins: Any, sign: float) -> torch.Tensor:
    width = cos.shape[-1]
    half = width // 2
    out = torch.empty_like(x)
    torch.mul(x[..., :width], cos, out=out[..., :width])
    out[..., :half].addcmul_(x[..., half:width], sins[0], value=-sign)
    out[..., half:width].addcmul_(x[..., :half], sins[1], value=sign)
    if width < x.shape[-1]:
        out[..., width:] = x[..., width:]
    return out


def rotary_forward(module: torch.nn.Module) -> Any:
    """The forward of this module's class with lean RoPE; None where it calls no RoPE, or one that computes otherwise."""
    forward: Any = type(module).forward
    if not isinstance(forward, FunctionType) or _NAME not in forward.__code__.co_names or hasattr(forward, "__wrapped__"):
        return None
    theirs = forward.__globals__.get(_NAME)
    key = (forward, theirs)
    if key not in _KNOWN:
        _KNOWN[key] = _calling(forward, _lean(theirs)) if _computes_rotary(theirs) else None
    return _KNOWN[key]


#: What was found for a forward and the function it calls: layers repeat.
_KNOWN: dict[Any, Any] = {}


def _calling(forward: Any, ours: Callable[..., Any]) -> Any:
    code, named = forward.__code__, {**forward.__globals__, _NAME: ours}
    made = FunctionType(code, named, forward.__name__, forward.__defaults__, forward.__closure__)
    made.__kwdefaults__ = forward.__kwdefaults__
    return made


def _lean(theirs: Any) -> Callable[..., Any]:
    """`theirs`, with lean rotation where autograd records it."""

    def pair(q: torch.Tensor, k: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, unsqueeze_dim: int = 1) -> Any:
        if not (_fits(q, cos, sin) and _fits(k, cos, sin)):
            return theirs(q, k, cos, sin, unsqueeze_dim)
        cos, sin = cos.unsqueeze(unsqueeze_dim), sin.unsqueeze(unsqueeze_dim)
        return Rotary.apply(q, cos, sin), Rotary.apply(k, cos, sin)

    def single(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, unsqueeze_dim: int = 1) -> Any:
        if not _fits(x, cos, sin):
            return theirs(x, cos, sin, unsqueeze_dim)
        return Rotary.apply(x, cos.unsqueeze(unsqueeze_dim), sin.unsqueeze(unsqueeze_dim))

    partly = _computes(theirs, _HEAD // 2)

    def _fits(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> bool:
        plain = torch.is_grad_enabled() and x.dtype == cos.dtype == sin.dtype and not (cos.requires_grad or sin.requires_grad)
        return plain and cos.shape == sin.shape and (cos.shape[-1] == x.shape[-1] or (partly and cos.shape[-1] < x.shape[-1]))

    return pair if _parameters(theirs) == _PAIR else single


def _computes_rotary(theirs: Any) -> bool:
    return _parameters(theirs) in (_PAIR, _SINGLE) and _computes(theirs, _HEAD)


def _parameters(theirs: Any) -> tuple[str, ...]:
    code = getattr(theirs, "__code__", None)
    return () if code is None else code.co_varnames[: code.co_argcount + code.co_kwonlyargcount]


def _computes(theirs: Any, width: int) -> bool:
    """Whether it rotates the first `width` of a head by any cos and sin, with the heads before the tokens and after them."""
    random = torch.Generator().manual_seed(0)
    cos, sin = torch.randn(2, 2, 5, width, generator=random, dtype=torch.float64)
    for dim, shape in ((1, (2, 3, 5, _HEAD)), (2, (2, 5, 3, _HEAD))):
        x = torch.randn(shape, generator=random, dtype=torch.float64)
        pair = _parameters(theirs) == _PAIR
        try:
            out = theirs(*((x, 2 * x) if pair else (x,)), cos, sin, unsqueeze_dim=dim)
        except Exception:  # noqa: BLE001 - any code may be in there; it is not RoPE of this width then
            return False
        ours = _rotated(x, cos.unsqueeze(dim), sin.unsqueeze(dim).chunk(2, -1), 1.0)
        outs = [*out] if pair and isinstance(out, tuple) else [out]
        wanted = [ours, 2 * ours] if pair else [ours]
        if len(outs) != len(wanted) or not all(map(_equal, outs, wanted)):
            return False
    return True


def _equal(theirs: Any, ours: torch.Tensor) -> bool:
    same = isinstance(theirs, torch.Tensor) and theirs.dtype == ours.dtype and theirs.shape == ours.shape
    return same and torch.allclose(theirs, ours, rtol=1e-9, atol=1e-12)
