"""Rotary position embedding (RoPE; Su et al., 2021, arXiv 2104.09864) as one autograd function."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from types import CellType, CodeType, FunctionType
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

#: The name of the RoPE function in a model's file, and its possible parameters; the last parameter has a default.
_NAME = "apply_rotary_pos_emb"
_PARAMETERS = (["q", "k", "cos", "sin", "unsqueeze_dim"], ["x", "cos", "sin", "unsqueeze_dim"])
_HALF = (torch.bfloat16, torch.float16)
#: head_dim in trials of a function.
_TRIAL_WIDTH = 8


class RopeForm(NamedTuple):
    """Parameters and variants of a model's RoPE function."""

    parameters: list[str]
    #: With a narrower cos, rotates the first part of a head and copies the rest.
    rotates_part: bool
    #: Computes in the fp32 of cos, and returns the dtype of its input.
    casts: bool


# Each model's file in transformers has a RoPE function, of twice as many operators, which attention calls by name. If the
# function computes RoPE on random values, attention gets a copy of its class's forward that computes with this class instead.
class Rotary(torch.autograd.Function):
    """x * cos + rotate_half(x) * sin; cos and sin broadcast to x, (batch, heads, tokens, head_dim) or with heads and tokens
    swapped."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        ctx.save_for_backward(cos, sin)
        return _rotated(x, cos, sin.chunk(2, -1), 1.0)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> Any:
        cos, sin = ctx.saved_tensors
        # the gradient is rotated back by the same angles
        return _rotated(grad, cos, sin.chunk(2, -1)[::-1], -1.0), None, None


def _rotated(x: Tensor, cos: Tensor, sin_halves: Any, sign: float) -> Tensor:
    width = cos.shape[-1]
    half = width // 2
    out = torch.empty_like(x, dtype=cos.dtype)
    torch.mul(x[..., :width], cos, out=out[..., :width])
    out[..., :half].addcmul_(x[..., half:width], sin_halves[0], value=-sign)
    out[..., half:width].addcmul_(x[..., :half], sin_halves[1], value=sign)
    if width < x.shape[-1]:
        out[..., width:] = x[..., width:]
    return out.to(x.dtype)


def rotary_forward(module: Any) -> Any:
    """Return the class's forward with lean RoPE, or None."""
    if getattr(getattr(module, "config", None), "rope_interleave", False):  # attention calls another function
        return None
    return forward_with(module, _NAME, _lean_rope)


def forward_with(module: Any, name: str, make_lean: Callable[[Any], Any]) -> Any:
    """Return the class's forward with `make_lean(function)` in place of the function `name`, or None if either is missing."""
    forward: Any = type(module).forward
    undecorated: Any = inspect.unwrap(forward)
    if not isinstance(undecorated, FunctionType) or name not in undecorated.__code__.co_names:
        return None
    function = undecorated.__globals__.get(name)
    if function not in _REPLACEMENTS:
        _REPLACEMENTS[function] = make_lean(function)
    return None if _REPLACEMENTS[function] is None else _with_replacement(forward, name, _REPLACEMENTS[function])


#: A model's function -> the lean function, shared by all layers, or None for a function that computes something else.
_REPLACEMENTS: dict[Any, Any] = {}


def _with_replacement(forward: Any, name: str, function: Callable[..., Any]) -> Any:
    # transformers 5.24 decorates forwards. A decorator that holds the forward in its closure is copied around the new forward;
    # with any other decorator the forward is not replaced.
    if (decorated := getattr(forward, "__wrapped__", None)) is not None:
        replacement, cells = _with_replacement(decorated, name, function), forward.__closure__ or ()
        if replacement is None or not any(cell.cell_contents is decorated for cell in cells):
            return None
        cells = tuple(CellType(replacement) if cell.cell_contents is decorated else cell for cell in cells)
        decorator = _copy(forward, forward.__code__, cells)
        decorator.__wrapped__ = replacement
        return decorator
    lean_name, code = f"_lean_{name}", forward.__code__
    # the lean function gets a new name in the module's globals: all other code there still calls the model's function
    forward.__globals__[lean_name] = function
    code = code.replace(co_names=tuple(lean_name if used == name else used for used in code.co_names))
    return _copy(forward, code, forward.__closure__)


def _copy(function: Any, code: CodeType, closure: tuple[CellType, ...] | None) -> Any:
    copy: Any = FunctionType(code, function.__globals__, function.__name__, function.__defaults__, closure)
    copy.__kwdefaults__ = function.__kwdefaults__
    return copy


def _lean_rope(model_rope: Any) -> Callable[..., Any] | None:
    """Return a model's RoPE with lean rotation, or None for another function."""
    if (form := _form(model_rope)) is None:
        return None

    def lean_rope(*arguments: Any, **keywords: Any) -> Any:
        bound = {"unsqueeze_dim": 1, **dict(zip(form.parameters, arguments, strict=False)), **keywords}
        tensors = [value for name in form.parameters[:-1] if isinstance(value := bound.get(name), Tensor)]
        # unknown keywords, or missing tensors
        if len(bound) > len(form.parameters) or len(tensors) < len(form.parameters) - 1:
            return model_rope(*arguments, **keywords)
        *inputs, cos, sin = tensors
        cos, sin = cos.unsqueeze(bound["unsqueeze_dim"]), sin.unsqueeze(bound["unsqueeze_dim"])
        if not all(_fits(x, cos, sin, form) for x in inputs):
            return model_rope(*arguments, **keywords)
        outs = tuple(Rotary.apply(x, cos, sin) for x in inputs)
        return outs if len(outs) > 1 else outs[0]

    return lean_rope


def _fits(x: Tensor, cos: Tensor, sin: Tensor, form: RopeForm) -> bool:
    if not torch.is_grad_enabled() or cos.requires_grad or sin.requires_grad:
        return False
    if cos.shape != sin.shape or cos.dtype != sin.dtype or cos.dim() != x.dim() or cos.shape[-1] % 2:
        return False
    broadcasts = all(size in (1, x_size) for size, x_size in zip(cos.shape[:-1], x.shape[:-1], strict=True))
    fits_width = cos.shape[-1] == x.shape[-1] or (form.rotates_part and cos.shape[-1] < x.shape[-1])
    fits_dtype = x.dtype == cos.dtype or (form.casts and cos.dtype == torch.float32 and x.dtype in _HALF)
    return broadcasts and fits_width and fits_dtype


def _form(function: Any) -> RopeForm | None:
    """Return the form of a model's RoPE, or None for another function."""
    # the package `kernels` turns the function into a module with the same parameters
    plain_function = type(function).forward if isinstance(function, torch.nn.Module) else function
    try:
        parameters = inspect.signature(plain_function).parameters
    except (TypeError, ValueError):
        return None
    names = [name for name in parameters if name != "self"]
    defaults = [parameter.default for parameter in parameters.values() if parameter.default is not parameter.empty]
    if names not in _PARAMETERS or defaults != [1] or not _computes_rope(function, names, _TRIAL_WIDTH):
        return None
    rotates_part = _computes_rope(function, names, _TRIAL_WIDTH // 2)
    return RopeForm(names, rotates_part, _computes_rope(function, names, _TRIAL_WIDTH, torch.bfloat16, torch.float32))


def _computes_rope(
    model_rope: Any, names: list[str], width: int, dtype: torch.dtype = torch.float64, angle_dtype: torch.dtype = torch.float64
) -> bool:
    generator = torch.Generator().manual_seed(0)
    cos, sin = torch.randn(2, 2, 5, width, generator=generator, dtype=angle_dtype)
    # queries with 3 heads and keys with 1; heads before or after tokens
    for dim, shapes in (1, [(2, 3, 5), (2, 1, 5)]), (2, [(2, 5, 3), (2, 5, 1)]):
        shapes = shapes[: len(names) - 3]  # all parameters but cos, sin and unsqueeze_dim
        inputs = [torch.randn(*shape, _TRIAL_WIDTH, generator=generator, dtype=torch.float64).to(dtype) for shape in shapes]
        try:
            out = model_rope(*inputs, cos, sin, unsqueeze_dim=dim)
        except Exception:  # noqa: BLE001 - arbitrary model code, which may not accept a cos of this width
            return False
        outs = list(out) if isinstance(out, tuple) else [out]
        expected = [_rotated(x, cos.unsqueeze(dim), sin.unsqueeze(dim).chunk(2, -1), 1.0) for x in inputs]
        if len(outs) != len(expected) or not all(map(_equal, outs, expected)):
            return False
    return True


def _equal(out: Any, expected: Tensor) -> bool:
    has_form = isinstance(out, Tensor) and out.dtype == expected.dtype and out.shape == expected.shape
    return has_form and torch.allclose(out, expected, rtol=1e-9 if expected.dtype == torch.float64 else 1e-2, atol=1e-12)
