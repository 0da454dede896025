"""Autograd functions for frozen layers with LoRA that save each 16-bit tensor once."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor
from torch.autograd.function import once_differentiable

from finetune.layers.host_memory import is_in_forecast
from finetune.layers.nf4 import QuantTables, dequantised, linear_4bit

#: Elements that a norm's backward copies to fp32 at a time: 64 MiB for each copy.
_FP32_TILE = 2**24

# plain torch operators below: the same code runs on a GPU, a CPU and fake tensors
ReadInput = Callable[[], Tensor]
#: An adapter's a and b in the dtype of computation, or None and None.
CastAdapter = tuple[Tensor, Tensor] | tuple[None, None]


class Linear(NamedTuple):
    """A frozen linear layer and its adapter, if any."""

    weight: Tensor
    bias: Tensor | None
    #: Of a 4-bit weight.
    tables: QuantTables | None
    a: Tensor | None = None  # (rank, in)
    b: Tensor | None = None  # (out, rank)
    scale: float = 1.0
    #: Whether a and b need a gradient; a's gradient needs the layer's input.
    trains_a: bool = False
    trains_b: bool = False


class Activation(NamedTuple):
    """An activation function and its backward (grad, input, grad_input=output tensor)."""

    forward: Callable[[Tensor], Tensor]
    backward: Callable[..., Tensor]


class Mlp(NamedTuple):
    """A gated MLP: gate, up and down; or fused gate and up, and down."""

    linears: tuple[Linear, ...]
    act: Activation
    #: Up is the first half of the fused layer.
    swapped: bool


class NormForm(NamedTuple):
    """A variant of RMSNorm."""

    #: Adds 1 to the weight.
    plus_one: bool = False
    #: Multiplies by the weight in fp32, before rounding.
    rounds_last: bool = False
    #: Multiplies by silu of a second input.
    gated: bool = False


# Which tensors are saved and which are recomputed follows Unsloth's and torchtune's kernels and "Reducing Activation
# Recomputation" (Korthikanti et al., 2022, arXiv 2205.05198).
class LoraLinear(torch.autograd.Function):
    """x @ W.T + bias + scale * x @ A.T @ B.T for `x` (..., in)."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, linear: Linear, norm: Any, *_adapters: Tensor | None) -> Tensor:
        # autograd returns gradients of arguments only, so a and b are passed again in _adapters
        (cast,) = cast_adapters([linear], x.dtype)
        out, lora_act = linear_forward(_flat(x), linear, cast)
        ctx.linear, ctx.norm = linear, norm
        ctx.save_for_backward(_saved_input(x, norm, [linear]), lora_act)
        # no view, because Gemma 3n changes the output in place, which autograd forbids for views that a function returns
        return torch.ops.aten._unsafe_view(out, [*x.shape[:-1], out.shape[-1]])

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> Any:
        x, lora_act = ctx.saved_tensors
        (cast,) = cast_adapters([ctx.linear], grad.dtype)
        needs_dx = ctx.needs_input_grad[0]
        dx, da, db = linear_backward(_flat(grad), ctx.linear, cast, lora_act, _input_reader(ctx.norm, x), needs_dx=needs_dx)
        return None if dx is None else dx.view(*grad.shape[:-1], -1), None, None, da, db


class GatedMlp(torch.autograd.Function):
    """down(act(gate(x)) * up(x)) for `x` (..., hidden), as (tokens, hidden)."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, mlp: Mlp, norm: Any, *_adapters: Tensor | None) -> Tensor:
        casts = cast_adapters(mlp.linears, x.dtype)
        outs, lora_acts = _gate_and_up(_flat(x), mlp, casts)
        out, down_act = linear_forward(_gated_product(outs, mlp), mlp.linears[-1], casts[-1])
        ctx.mlp, ctx.norm, ctx.shape = mlp, norm, x.shape
        ctx.save_for_backward(_saved_input(x, norm, mlp.linears[:-1]), *outs, *lora_acts, down_act)
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> Any:
        x, *saved, down_act = ctx.saved_tensors
        count = len(ctx.mlp.linears) - 1
        outs, lora_acts = saved[:count], saved[count:]
        casts, read_input = cast_adapters(ctx.mlp.linears, grad.dtype), _input_reader(ctx.norm, x)
        dx, grads = _mlp_backward(_flat(grad), ctx.mlp, casts, outs, lora_acts, down_act, read_input, ctx.needs_input_grad[0])
        return None if dx is None else dx.view(ctx.shape), None, None, *grads


class TiledMlp(torch.autograd.Function):
    """`GatedMlp` over tiles of tokens, for a layer that is recomputed."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, mlp: Mlp, norm: Any, tile: int, *_adapters: Tensor | None) -> Tensor:
        casts = cast_adapters(mlp.linears, x.dtype)

        def tile_forward(tile_x: Tensor) -> Tensor:
            # no name for gate and up, so that they are freed before `down` runs
            product = _gated_product(_gate_and_up(tile_x, mlp, casts)[0], mlp)
            return linear_forward(product, mlp.linears[-1], casts[-1])[0]

        ctx.mlp, ctx.norm, ctx.shape, ctx.tile = mlp, norm, x.shape, tile
        if norm is None:
            # after a norm nothing is saved, and recomputation stops early, before this MLP: no matrix product is computed
            # more often than without tiles
            ctx.save_for_backward(x)
        return in_tiles(tile_forward, tile, _flat(x))

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> Any:
        mlp, needs_dx = ctx.mlp, ctx.needs_input_grad[0]
        x = _input_reader(ctx.norm, None if ctx.norm else ctx.saved_tensors[0])()
        casts, flat_grad = cast_adapters(mlp.linears, grad.dtype), _flat(grad)
        dx = torch.empty_like(x) if needs_dx else None
        adapter_grads: list[Any] = []  # in the adapters' dtype, usually fp32
        for start in range(0, max(1, len(x)), ctx.tile):
            tile = slice(start, start + ctx.tile)
            tile_x = x[tile]
            outs, lora_acts = _gate_and_up(tile_x, mlp, casts)
            tile_dx, tile_grads = _mlp_backward(flat_grad[tile], mlp, casts, outs, lora_acts, None, lambda: tile_x, needs_dx)  # noqa: B023
            if dx is not None and tile_dx is not None:
                dx[tile] = tile_dx
            for total, tile_grad in zip(adapter_grads, tile_grads, strict=False):  # nothing to add to in the first tile
                if total is not None:
                    total.add_(tile_grad)
            adapter_grads = adapter_grads or tile_grads
            del outs, lora_acts, tile_dx, tile_grads
        return None if dx is None else dx.view(ctx.shape), None, None, None, *adapter_grads


def in_tiles(function: Callable[..., Tensor], tile: int, *tensors: Tensor) -> Tensor:
    """Apply `function` to `tile` tokens of the tensors (tokens, ...) at a time."""
    tokens = len(tensors[0])
    if tokens <= tile:
        return function(*tensors)
    out = None
    for start in range(0, tokens, tile):
        tile_out = function(*(tensor[start : start + tile] for tensor in tensors))
        out = tile_out.new_empty(tokens, *tile_out.shape[1:]) if out is None else out
        out[start : start + tile] = tile_out
        del tile_out  # before the next tile is computed
    assert out is not None
    return out


def _gate_and_up(x: Tensor, mlp: Mlp, casts: list[CastAdapter]) -> tuple[Any, Any]:
    """Return the outputs of gate and up, and scale * x @ A.T of each."""
    pairs = [linear_forward(x, linear, cast) for linear, cast in zip(mlp.linears[:-1], casts[:-1], strict=True)]
    outs, lora_acts = zip(*pairs, strict=True)
    return outs, lora_acts


def _gated_product(outs: Sequence[Tensor], mlp: Mlp) -> Tensor:
    gate, up = split_gate_up(outs, mlp.swapped)
    return mlp.act.forward(gate).mul_(up)


def _mlp_backward(
    grad: Tensor, mlp: Mlp, casts: list[CastAdapter], outs: Sequence[Tensor],
    lora_acts: Sequence[Tensor | None], down_act: Tensor | None, read_input: ReadInput, needs_dx: bool,
) -> tuple[Tensor | None, list[Tensor | None]]:  # fmt: skip
    """Return the gradients of x and of each layer's a and b."""
    *entries, down = mlp.linears
    gate, up = split_gate_up(outs, mlp.swapped)
    activated = mlp.act.forward(gate)
    product = activated * up  # input of `down`; `linear_backward` overwrites it with its gradient
    # `TiledMlp` passes no `down_act`: recompute it
    if down_act is None and casts[-1][0] is not None:
        down_act = scaled_product(product, casts[-1][0].t(), down.scale)
    _, *down_grads = linear_backward(grad, down, casts[-1], down_act, lambda: product, out=product)
    # separate gate and up: reuse `product` and `activated` for the gradients; fused: write both into halves of one tensor
    d_outs = [product, activated] if len(entries) == 2 else [torch.empty_like(outs[0])]
    d_gate, d_up = split_gate_up(d_outs, mlp.swapped)
    torch.mul(activated, product, out=d_up)
    mlp.act.backward(product.mul_(up), gate, grad_input=d_gate)
    dx, entry_grads = None, []
    for linear, cast, lora_act, d_out in zip(entries, casts[:-1], lora_acts, d_outs, strict=True):
        dx, *linear_grads = linear_backward(d_out, linear, cast, lora_act, read_input, add_to=dx, needs_dx=needs_dx)
        entry_grads += linear_grads
    return dx, [*entry_grads, *down_grads]


class RmsNorm(torch.autograd.Function):
    """RMSNorm over the last dimension with a frozen weight."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, eps: float, form: NormForm) -> Tensor:
        norm = torch.linalg.vector_norm(x, dim=-1, keepdim=True, dtype=torch.float32)
        # one fp32 number per row
        rstd = norm.square_().div_(x.shape[-1]).add_(eps).rsqrt_()
        ctx.save_for_backward(x, rstd, weight)
        ctx.form, ctx.norm_inputs, ctx.output = form, None, None
        return _normalised(x, rstd, weight, form)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> Any:
        # all readers of the output have run their backward, so the output can be freed
        x, rstd, weight = ctx.norm_inputs or ctx.saved_tensors
        ctx.norm_inputs = ctx.output = None
        weight32 = _weight32(weight, ctx.form)

        def tile_backward(x: Tensor, rstd: Tensor, grad: Tensor) -> Tensor:
            scaled, x32 = grad * weight32, x.float()
            factor = (scaled * x32).sum(-1, keepdim=True).mul_(rstd**3).div_(x.shape[-1])
            return scaled.mul_(rstd).addcmul_(x32, factor, value=-1).to(x.dtype)

        tile = max(1, _FP32_TILE // x.shape[-1])
        return in_tiles(tile_backward, tile, _flat(x), _flat(rstd), _flat(grad)).view(x.shape), None, None, None


class GatedRmsNorm(torch.autograd.Function):
    """RMSNorm times silu of a gate, in gated delta nets, for x and gate (..., width)."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, gate: Tensor, weight: Tensor, eps: float) -> Tensor:
        def tile_forward(x: Tensor, gate: Tensor) -> Tensor:
            return torch.mul(x, _rstd(x, eps), out=torch.empty_like(x)).mul_(weight).mul_(F.silu(gate.float()))

        ctx.save_for_backward(x, gate, weight)
        ctx.eps, ctx.tile = eps, max(1, _FP32_TILE // x.shape[-1])
        return in_tiles(tile_forward, ctx.tile, _flat(x), _flat(gate)).view(x.shape)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> Any:
        x, gate, weight = ctx.saved_tensors
        dx = torch.empty_like(x, memory_format=torch.contiguous_format)

        def tile_backward(x: Tensor, gate: Tensor, grad: Tensor, dx: Tensor) -> Tensor:
            # rounded where transformers rounds
            rstd, gate32 = _rstd(x, ctx.eps), gate.float()
            d_normed = torch.mul(grad, F.silu(gate32), out=torch.empty_like(x)).mul_(weight)
            d_gate = torch.mul(x, rstd, out=torch.empty_like(x)).mul_(weight).float().mul_(grad)
            torch.ops.aten.silu_backward.grad_input(d_gate, gate32, grad_input=d_gate)
            d_gate, x32 = d_gate.to(gate.dtype), x.to(torch.float32, copy=True)
            del gate32
            factor = (d_normed * x32).sum(-1, keepdim=True).mul_(rstd**3).div_(x.shape[-1])
            torch.sub(d_normed * rstd, x32.mul_(factor), out=dx)  # addcmul rounds once, autograd twice
            return d_gate

        d_gate = in_tiles(tile_backward, ctx.tile, _flat(x), _flat(gate), _flat(grad), _flat(dx))
        return dx, d_gate.view(gate.shape), None, None


def _rstd(x: Tensor, eps: float) -> Tensor:
    return x.to(torch.float32, copy=True).square_().mean(-1, keepdim=True).add_(eps).rsqrt_()


class ShortConvolution(torch.autograd.Function):
    """silu of a causal depthwise convolution of x (batch, channels, tokens) by `weight` (channels, width)."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        # silu's backward needs `padded`; the convolution's backward needs only `weight`, which is frozen
        padded = F.conv1d(x, weight.unsqueeze(1), padding=weight.shape[1] - 1, groups=len(weight))
        ctx.save_for_backward(padded, weight)
        return F.silu(padded[:, :, : x.shape[2]])

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> Any:
        (padded, weight), tokens = ctx.saved_tensors, grad.shape[2]
        d_padded = torch.empty_like(padded)
        d_padded[:, :, tokens:] = 0.0
        torch.ops.aten.silu_backward.grad_input(grad, padded[:, :, :tokens], grad_input=d_padded[:, :, :tokens])
        x = d_padded.flatten()[: grad.numel()].view(grad.shape)  # only its shape is read; it would be copied if not contiguous
        # stride, padding, dilation, transposed, output padding, groups
        geometry = [1], [weight.shape[1] - 1], [1], False, [0], len(weight)
        return torch.ops.aten.convolution_backward(d_padded, x, weight[:, None], None, *geometry, [True, False, False])[0], None


def norm_of(x: Tensor) -> Any:
    """Return the autograd node of the `RmsNorm` whose output is `x`, or None."""
    return x.grad_fn if isinstance(x.grad_fn, RmsNorm._backward_cls) else None  # type: ignore[attr-defined]


def _normalised(x: Tensor, rstd: Tensor, weight: Tensor, form: NormForm) -> Tensor:
    if form.rounds_last:
        return torch.mul(x * rstd, _weight32(weight, form), out=torch.empty_like(x))
    return torch.mul(x, rstd, out=torch.empty_like(x)).mul_(weight)


def _weight32(weight: Tensor, form: NormForm) -> Tensor:
    return weight.float() + 1.0 if form.plus_one else weight.float()


def _input_reader(norm: Any, x: Tensor | None) -> ReadInput:
    """Return a reader of `x`, or of the output of `norm`, recomputed once for all readers."""

    def read_input() -> Tensor:
        if norm is None:
            assert x is not None
            return _flat(x)
        if norm.output is None:
            # gradient checkpointing lets saved tensors be unpacked only once: keep them for the norm's backward
            norm_x, rstd, weight = norm.norm_inputs = norm.saved_tensors
            norm.output = _normalised(norm_x, rstd, weight, norm.form)
        return _flat(norm.output)

    return read_input


def _saved_input(x: Tensor, norm: Any, linears: Sequence[Linear]) -> Tensor | None:
    # only the gradient of a needs the input, and a norm's output is recomputed from the norm's input
    return x if norm is None and any(linear.trains_a for linear in linears) else None


def cast_adapters(linears: Sequence[Linear], dtype: torch.dtype) -> list[CastAdapter]:
    """Return each layer's a and b in the dtype of computation."""
    # backward casts again: saving the casts would cost a layer of Llama-3.1-8B as much as 320 tokens of its input, at rank 16
    masters: list[Any] = [master for linear in linears for master in (linear.a, linear.b)]
    casts = [master if master is None or master.dtype == dtype else torch.empty_like(master, dtype=dtype) for master in masters]
    pairs = [(copy, master) for copy, master in zip(casts, masters, strict=True) if copy is not master]
    if pairs:
        torch._foreach_copy_([copy for copy, _ in pairs], [master for _, master in pairs])  # one kernel for all adapters
    return list(zip(casts[::2], casts[1::2], strict=True))  # (a, b) of each layer


def linear_forward(x: Tensor, linear: Linear, cast: CastAdapter) -> tuple[Tensor, Tensor | None]:
    """Return the output (tokens, out) for x (tokens, in), and scale * x @ A.T."""
    weight, bias, tables = linear[:3]
    out = F.linear(x, weight, bias) if tables is None else linear_4bit(x, weight, tables, bias)
    a, b = cast
    if a is None or b is None:
        return out, None
    lora_act = scaled_product(x, a.t(), linear.scale)
    # lora_act is saved: it has only rank columns
    return out.addmm_(lora_act, b.t()), lora_act


def linear_backward(
    grad: Tensor, linear: Linear, cast: CastAdapter, lora_act: Any, read_x: ReadInput, *,
    add_to: Tensor | None = None, needs_dx: bool = True, out: Tensor | None = None,
) -> tuple[Tensor | None, Tensor | None, Tensor | None]:  # fmt: skip
    """Return the gradients of x, a and b. The gradient of x is added to `add_to`, or written to `out`."""
    a, b = cast
    da = db = None
    if linear.a is not None and linear.b is not None and a is not None and b is not None:
        lora_grad = scaled_product(grad, b, linear.scale)
        # cuBLAS writes fp32 products of 16-bit factors: no cast, and no rounding of the gradient to 16 bit
        writes_fp32 = linear.a.dtype != grad.dtype and (grad.is_cuda or is_in_forecast(grad))
        options: dict[str, Any] = {"out_dtype": linear.a.dtype} if writes_fp32 else {}
        if linear.trains_a:
            da = torch.mm(lora_grad.t(), read_x(), **options).to(linear.a.dtype)
        if linear.trains_b:
            db = torch.mm(grad.t(), lora_act, **options).to(linear.b.dtype)
    if not needs_dx:
        return None, da, db
    tables = linear.tables
    weight = linear.weight if tables is None else dequantised(linear.weight, tables, grad.dtype)
    dx = torch.mm(grad, weight, out=out) if add_to is None else add_to.addmm_(grad, weight)
    return dx if a is None else dx.addmm_(lora_grad, a), da, db


def scaled_product(left: Tensor, right: Tensor, scale: float) -> Tensor:
    """Return scale * left @ right."""
    out = left.new_empty(left.shape[0], right.shape[1])
    return out.addmm_(left, right, beta=0, alpha=scale)  # with beta 0 the content of `out` is not read


def split_gate_up(outs: Any, swapped: bool) -> tuple[Tensor, Tensor]:
    """Return gate and up of separate outputs, or of one fused output."""
    first, second = outs if len(outs) == 2 else outs[0].chunk(2, dim=-1)
    return (second, first) if swapped else (first, second)


def _flat(x: Tensor) -> Tensor:
    return x.reshape(-1, x.shape[-1])
