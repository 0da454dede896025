"""Rotary position embedding (RoPE; Su et al., 2021, arXiv 2104.09864) as one autograd function."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from types import CellType, CodeType, FunctionType
from typing import Any, NamedTuple

import torch
from torch.autograd.function import once_differentiable

#: The name of RoPE in a model's file, and its possible parameters; the last parameter has a default.
_NAME = "apply_rotary_pos_emb"
_PARAMETERS = (["q", "k", "cos", "sin", "unsqueeze_dim"], ["x", "cos", "sin", "unsqueeze_dim"])
_HALF = (torch.bfloat16, torch.float16)
#: Width of the head in trials of a function.
_WIDTH = 8


class Form(NamedTuple):
    """How a model's RoPE function is called, and its variants."""

    names: list[str]
    #: Rotates the first part of a head by a narrower cos, and copies the rest.
    partly: bool
    #: Computes in the fp32 of cos, and returns the dtype of its input.
    casts: bool


# transformers has RoPE as a function in each model's file, of twice as many operators, which attention calls by its name. A
# function that computes RoPE on random values is replaced: attention gets its class's forward with this class under that
# name.
class Rotary(torch.autograd.Function):
    """x * cos + rotate_half(x) * sin for cos and sin that broadcast to x, (batch, heads, tokens, head) or with heads and
    tokens swapped."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(cos, sin)
        return _rotated(x, cos, sin.chunk(2, -1), 1.0)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: torch.Tensor) -> Any:
        cos, sin = ctx.saved_tensors
        # backward is the rotation back
        return _rotated(grad, cos, sin.chunk(2, -1)[::-1], -1.0), None, None


def _rotated(x: torch.Tensor, cos: torch.Tensor, sins: Any, sign: float) -> torch.Tensor:
    width = cos.shape[-1]
    half = width // 2
    out = torch.empty_like(x, dtype=cos.dtype)
    torch.mul(x[..., :width], cos, out=out[..., :width])
    out[..., :half].addcmul_(x[..., half:width], sins[0], value=-sign)
    out[..., half:width].addcmul_(x[..., :half], sins[1], value=sign)
    if width < x.shape[-1]:
        out[..., width:] = x[..., width:]
    return out.to(x.dtype)


def rotary_forward(module: Any) -> Any:
    """Return the class's forward with lean RoPE, or None."""
    if getattr(getattr(module, "config", None), "rope_interleave", False):  # attention calls another function
        return None
    return forward_with(module, _NAME, _lean)


def forward_with(module: Any, name: str, lean: Callable[[Any], Any]) -> Any:
    """Return the class's forward with `lean(function)` in place of the function `name`, or None where either is missing."""
    forward: Any = type(module).forward
    undecorated: Any = inspect.unwrap(forward)
    if not isinstance(undecorated, FunctionType) or name not in undecorated.__code__.co_names:
        return None
    theirs = undecorated.__globals__.get(name)
    if theirs not in _REPLACEMENTS:
        _REPLACEMENTS[theirs] = lean(theirs)
    return None if _REPLACEMENTS[theirs] is None else _calling(forward, name, _REPLACEMENTS[theirs])


#: The lean form of a model's function, shared by its layers; None for a function that computes something else.
_REPLACEMENTS: dict[Any, Any] = {}


def _calling(forward: Any, name: str, function: Callable[..., Any]) -> Any:
    # transformers 5.24 decorates forwards: the decorators stay around the new forward, unless one does not keep it in its
    # closure
    if (decorated := getattr(forward, "__wrapped__", None)) is not None:
        replacement, cells = _calling(decorated, name, function), forward.__closure__ or ()
        if replacement is None or not any(cell.cell_contents is decorated for cell in cells):
            return None
        cells = tuple(CellType(replacement) if cell.cell_contents is decorated else cell for cell in cells)
        decorator = _copy(forward, forward.__code__, cells)
        decorator.__wrapped__ = replacement
        return decorator
    lean_name, code = f"_lean_{name}", forward.__code__
    # the function gets a second name in the module's globals, so that everything else sees them unchanged
    forward.__globals__[lean_name] = function
    code = code.replace(co_names=tuple(lean_name if used == name else used for used in code.co_names))
    return _copy(forward, code, forward.__closure__)


def _copy(function: Any, code: CodeType, closure: tuple[CellType, ...] | None) -> Any:
    copy: Any = FunctionType(code, function.__globals__, function.__name__, function.__defaults__, closure)
    copy.__kwdefaults__ = function.__kwdefaults__
    return copy


def _lean(model_rope: Any) -> Callable[..., Any] | None:
    """Return a model's RoPE with lean rotation, or None for another function."""
    if (form := _form(model_rope)) is None:
        return None

    def ours(*arguments: Any, **keywords: Any) -> Any:
        bound = {"unsqueeze_dim": 1, **dict(zip(form.names, arguments, strict=False)), **keywords}
        tensors = [value for name in form.names[:-1] if isinstance(value := bound.get(name), torch.Tensor)]
        if len(bound) > len(form.names) or len(tensors) < len(form.names) - 1:
            return model_rope(*arguments, **keywords)
        *inputs, cos, sin = tensors
        cos, sin = cos.unsqueeze(bound["unsqueeze_dim"]), sin.unsqueeze(bound["unsqueeze_dim"])
        if not all(_fits(x, cos, sin, form) for x in inputs):
            return model_rope(*arguments, **keywords)
        outs = tuple(Rotary.apply(x, cos, sin) for x in inputs)
        return outs if len(outs) > 1 else outs[0]

    return ours


def _fits(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, form: Form) -> bool:
    if not torch.is_grad_enabled() or cos.requires_grad or sin.requires_grad:
        return False
    if cos.shape != sin.shape or cos.dtype != sin.dtype or cos.dim() != x.dim() or cos.shape[-1] % 2:
        return False
    broadcast = all(size in (1, of_x) for size, of_x in zip(cos.shape[:-1], x.shape[:-1], strict=True))
    wide = cos.shape[-1] == x.shape[-1] or (form.partly and cos.shape[-1] < x.shape[-1])
    return broadcast and wide and (x.dtype == cos.dtype or (form.casts and cos.dtype == torch.float32 and x.dtype in _HALF))


def _form(theirs: Any) -> Form | None:
    """Return the form of a model's RoPE, or None for another function."""
    try:
        # the package `kernels` turns the function into a module with the same parameters
        parameters = inspect.signature(type(theirs).forward if isinstance(theirs, torch.nn.Module) else theirs).parameters
    except (TypeError, ValueError):
        return None
    names = [name for name in parameters if name != "self"]
    defaults = [parameter.default for parameter in parameters.values() if parameter.default is not parameter.empty]
    if names not in _PARAMETERS or defaults != [1] or not _computes(theirs, names, _WIDTH):
        return None
    return Form(names, _computes(theirs, names, _WIDTH // 2), _computes(theirs, names, _WIDTH, torch.bfloat16, torch.float32))


def _computes(
    model_rope: Any, names: list[str], width: int, dtype: torch.dtype = torch.float64, angle_dtype: torch.dtype = torch.float64
) -> bool:
    generator = torch.Generator().manual_seed(0)
    cos, sin = torch.randn(2, 2, 5, width, generator=generator, dtype=angle_dtype)
    for dim, shapes in ((1, ((2, 3, 5, _WIDTH), (2, 1, 5, _WIDTH))), (2, ((2, 5, 3, _WIDTH), (2, 5, 1, _WIDTH)))):
        inputs = [torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype) for shape in shapes[: len(names) - 3]]
        try:
            out = model_rope(*inputs, cos, sin, unsqueeze_dim=dim)
        except Exception:  # noqa: BLE001 - any code may be in there; it is not RoPE of this width then
            return False
        outs = list(out) if isinstance(out, tuple) else [out]
        expected = [_rotated(x, cos.unsqueeze(dim), sin.unsqueeze(dim).chunk(2, -1), 1.0) for x in inputs]
        if len(outs) != len(expected) or not all(map(_equal, outs, expected)):
            return False
    return True


def _equal(theirs: Any, ours: torch.Tensor) -> bool:
    same_form = isinstance(theirs, torch.Tensor) and theirs.dtype == ours.dtype and theirs.shape == ours.shape
    return same_form and torch.allclose(theirs, ours, rtol=1e-9 if ours.dtype == torch.float64 else 1e-2, atol=1e-12)
