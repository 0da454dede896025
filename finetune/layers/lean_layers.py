"""Lean forwards for a model with adapters: they save about half the bytes for backward."""

from __future__ import annotations

import functools
import inspect
import itertools
from collections import Counter
from collections.abc import Iterator
from types import MethodType
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F  # noqa: N812
from bitsandbytes.nn import Linear4bit
from peft.tuners.lora import Linear as LoraPlain
from peft.tuners.lora import Linear4bit as Lora4bit
from peft.tuners.lora import LoraLayer
from torch import Tensor, nn
from torch._subclasses.fake_tensor import unset_fake_temporarily

from finetune.layers import lean_functions as functions
from finetune.layers.experts import is_packed
from finetune.layers.lean_functions import Activation, Linear, Mlp, NormForm
from finetune.layers.nf4 import NESTED_BLOCK, QuantTables
from finetune.layers.rotary import forward_with, rotary_forward

_LORA_TYPES = (LoraPlain, Lora4bit)
_NORM_FORMS = (NormForm(), NormForm(rounds_last=True), NormForm(plus_one=True, rounds_last=True), NormForm(gated=True))
_GELU_BACKWARD = torch.ops.aten.gelu_backward.grad_input
_ACTIVATIONS = (
    Activation(F.silu, torch.ops.aten.silu_backward.grad_input),
    Activation(F.gelu, _GELU_BACKWARD),
    Activation(*(functools.partial(gelu, approximate="tanh") for gelu in (F.gelu, _GELU_BACKWARD))),
)


class GatedParts(NamedTuple):
    """Names of the layers of a gated MLP, as in `Mlp`."""

    linears: tuple[str, ...]
    act: str
    #: Up is the first half of the fused layer.
    swapped: bool


def make_lean(layers: list[nn.Module]) -> None:
    """Give modules of these layers lean forwards."""
    undo_lean(layers)
    with unset_fake_temporarily():
        for module in (module for layer in layers for module in layer.modules()):
            if is_packed(module):
                # the experts' forward reads it
                vars(module)["lean"] = {"kind": "layer of 4-bit experts"}
            elif "forward" in vars(module):  # another patch's forward stays
                continue
            elif type(module) in _LORA_TYPES:
                if is_adapted(module):
                    set_forward(module, _linear_forward)
            elif form := norm_form(module):
                set_forward(module, _norm_forward, kind="norm", form=form)
            elif parts := gated_parts(module):
                act = _activation(getattr(module, parts.act))
                set_forward(module, _mlp_forward, kind="MLP", parts=parts, act=act)
            elif forward := rotary_forward(module):
                set_forward(module, forward, kind="RoPE")
            else:
                is_delta_net = any(form.gated for form in map(norm_form, module.children()) if form)
                if is_delta_net and (forward := forward_with(module, "causal_conv1d_fn", _lean_convolution)):
                    set_forward(module, forward, kind="short convolution")


def tile_mlps(layers: list[nn.Module], tile: int) -> None:
    """Compute lean gated MLPs over tiles of at most `tile` tokens, by `TiledMlp`."""
    for module in (module for layer in layers for module in layer.modules() if "parts" in _lean_state(module)):
        _lean_state(module)["tile"] = tile


def undo_lean(layers: list[nn.Module]) -> None:
    """Remove the forwards that `set_forward` has set."""
    for module in (module for layer in layers for module in layer.modules()):
        if "forward" in vars(module).pop("lean", {}):
            del vars(module)["forward"]


def lean_summary(layer: nn.Module) -> str:
    """Summarise a decoder layer's lean and ordinary modules."""
    lean: Counter[str] = Counter()
    ordinary: Counter[str] = Counter()
    in_lean_mlps = {id(part) for module in layer.modules() if "parts" in _lean_state(module) for part in module.children()}
    for module in layer.modules():
        name = type(module).__name__
        if kind := _lean_state(module).get("kind"):
            lean[kind] += 1
        elif isinstance(module, LoraLayer) and id(module) not in in_lean_mlps:
            lean["linear layer"] += bool(_lean_state(module))
            ordinary[f"adapter on {type(module.get_base_layer()).__name__}"] += not _lean_state(module)
        elif name.endswith("Norm"):
            ordinary[name] += 1
    listed = ", ".join(f"{count} {name}{'s' if count > 1 else ''}" for name, count in lean.items() if count)
    others = ", ".join(f"{count} {name}" for name, count in ordinary.items() if count)
    return (listed or "nothing") + (f" (as before: {others})" if others else "")


def _lean_state(module: nn.Module) -> dict[str, Any]:
    return vars(module).get("lean", {})


def set_forward(module: Any, forward: Any, **lean: Any) -> None:
    """Set a module's forward until `undo_lean`; `lean` is for the forward and the summary."""
    vars(module).update(forward=MethodType(forward, module), lean={"forward": forward.__name__, **lean})


def _linear_forward(self: Any, x: Tensor, *args: Any, **named: Any) -> Tensor:
    linear = None if args or named else linear_of(self, x)
    if linear is None or linear.a is None:
        return type(self).forward(self, x, *args, **named)
    return functions.LoraLinear.apply(x, linear, functions.norm_of(x), linear.a, linear.b)


def _mlp_forward(self: Any, x: Tensor, *args: Any, **named: Any) -> Tensor:
    parts, tile = self.lean["parts"], self.lean.get("tile", 0)
    is_tiled = 0 < tile < x.numel() // x.shape[-1]
    # `linear_of` returns None without gradients
    linears = tuple(linear for name in parts.linears if (linear := linear_of(getattr(self, name), x)))
    if args or named or len(linears) < len(parts.linears):
        class_forward = functools.partial(type(self).forward, self)
        if args or named or torch.is_grad_enabled() or not is_tiled:
            return class_forward(x, *args, **named)
        return functions.in_tiles(class_forward, tile, x.reshape(-1, x.shape[-1])).view(*x.shape[:-1], -1)
    adapters = [tensor for linear in linears for tensor in (linear.a, linear.b)]
    mlp, norm = Mlp(linears, self.lean["act"], parts.swapped), functions.norm_of(x)
    if is_tiled:
        out = functions.TiledMlp.apply(x, mlp, norm, tile, *adapters)
    else:
        out = functions.GatedMlp.apply(x, mlp, norm, *adapters)
    return out.view(*x.shape[:-1], -1)  # outside the function: torch refuses in-place changes of a view made inside


def _norm_forward(self: Any, x: Tensor, *gate: Any, **named: Any) -> Tensor:
    weight, form = self.weight, self.lean["form"]
    # without a graph nothing is saved: the class's own forward is as good
    is_ordinary = len(gate) != form.gated or named or weight.requires_grad or not torch.is_grad_enabled()
    if is_ordinary or (weight.dtype != x.dtype and not form.rounds_last) or any(tensor.dtype != x.dtype for tensor in gate):
        return type(self).forward(self, x, *gate, **named)
    return _normed(form, x, *gate, weight, _eps(self))


def _normed(form: NormForm, *inputs: Any) -> Tensor:
    return functions.GatedRmsNorm.apply(*inputs) if form.gated else functions.RmsNorm.apply(*inputs, form)


def _lean_convolution(model_convolution: Any) -> Any:
    generator = torch.Generator().manual_seed(0)
    inputs = torch.randn(2, 6, 9, generator=generator), torch.randn(6, 4, generator=generator)
    try:
        expected = model_convolution(*inputs, activation="silu")
        is_equal = torch.allclose(functions.ShortConvolution.apply(*inputs), expected, atol=1e-6)
    except Exception:  # noqa: BLE001 - causal-conv1d, which refuses CPU tensors, is not replaced
        is_equal = False

    def lean_convolution(x: Tensor, weight: Any, bias: Any = None, activation: str = "", **named: Any) -> Tensor:
        device = x.device.type
        dtype = torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else x.dtype
        is_ordinary = bias is not None or activation != "silu" or named.get("seq_idx") is not None  # packed examples
        if is_ordinary or not x.dtype == weight.dtype == dtype or weight.requires_grad or not torch.is_grad_enabled():
            return model_convolution(x, weight, bias, activation=activation, **named)
        return functions.ShortConvolution.apply(x, weight)

    return lean_convolution if is_equal else None


def is_adapted(module: nn.Module) -> bool:
    """Return whether `module` is a 16-bit or 4-bit linear layer with adapters."""
    return type(module) in _LORA_TYPES and type(_base(module)) in (nn.Linear, Linear4bit)


def linear_of(module: Any, x: Tensor) -> Linear | None:
    """Return `module` as a frozen `Linear` in the dtype of x, with at most one plain adapter, or None."""
    device = x.device.type
    autocast = torch.is_autocast_enabled(device)
    if not torch.is_grad_enabled() or (autocast and x.dtype != torch.get_autocast_dtype(device)):
        return None
    if type(module) not in _LORA_TYPES:
        return _frozen_linear(module, x.dtype)
    names = [name for name in module.active_adapters if name in module.lora_A]
    if len(names) != 1 or module.disable_adapters or module.merged:
        return None
    (name,) = names
    has_dropout = module.training and getattr(module.lora_dropout[name], "p", 0.0) > 0
    # variants: DoRA and others
    is_variant = module.lora_bias[name] or getattr(module, "fan_in_fan_out", False) or name in module.lora_variant
    if has_dropout or is_variant:
        return None
    a, b = module.lora_A[name], module.lora_B[name]
    base = _frozen_linear(module.base_layer, x.dtype)
    if base is None or any(map(_has_forward_hooks, (module, a, b))) or not (autocast or a.weight.dtype == x.dtype):
        return None
    a, b = a.weight, b.weight
    return Linear(*base[:3], a, b, module.scaling[name], a.requires_grad, b.requires_grad)


def _has_forward_hooks(module: nn.Module) -> bool:
    return bool(module._forward_hooks or module._forward_pre_hooks)


def _frozen_linear(base: Any, dtype: torch.dtype) -> Linear | None:
    weight, bias = base.weight, base.bias
    if weight.requires_grad or (bias is not None and bias.requires_grad) or _has_forward_hooks(base):
        return None
    if type(base) is nn.Linear:
        fits = weight.dtype == dtype and (bias is None or bias.dtype == dtype)
        return Linear(weight, bias, None) if fits else None
    if type(base) is not Linear4bit:
        return None
    state = getattr(weight, "quant_state", None)
    state = base.quant_state if state is None else state  # FSDP replaces the parameter, without its state
    if state is None or base.compute_dtype not in (None, dtype):
        return None
    # layouts that bitsandbytes' training kernels don't read
    if getattr(state, "packing_format_for_cpu", False) or (state.nested and state.state2.blocksize != NESTED_BLOCK):
        return None
    nested = (state.state2.absmax, state.state2.code, state.offset) if state.nested else ()
    tables = QuantTables((state.absmax, *nested), (*state.shape, state.blocksize), state.quant_type)
    # bitsandbytes casts the bias to the input's dtype in a layer's first forward; in a forecast the bias is still fp32
    return Linear(weight, None if bias is None else bias.to(dtype), tables)


def norm_form(module: nn.Module) -> NormForm | None:
    """Return the form of an RMSNorm, or None for another module."""
    names = [name for name, _ in module.named_parameters(recurse=False)]
    # not `module.weight`, which PEFT computes for an embedding with trained rows
    weight = module._parameters.get("weight")
    if names != ["weight"] or weight is None or weight.dim() != 1 or next(module.children(), None) is not None:
        return None
    if next(module.buffers(recurse=False), None) is not None or not isinstance(_eps(module), float):
        return None
    key = (type(module), weight.shape[0], _plain_values(module))
    if key not in _RECOGNISED:
        _RECOGNISED[key] = next((form for form in _NORM_FORMS if _computes_norm(module, form)), None)
    return _RECOGNISED[key]


def gated_parts(module: nn.Module) -> GatedParts | None:
    """Return the parts of a gated MLP, or None for another module."""
    children = dict(module.named_children())
    linears = {name: part for name, part in children.items() if type(_base(part)) in (nn.Linear, Linear4bit)}
    act_names = [name for name in children if name not in linears]
    own_tensors = [*module.parameters(recurse=False), *module.buffers(recurse=False)]
    if own_tensors or len(linears) not in (2, 3) or len(act_names) != 1 or not _activation(children[act_names[0]]):
        return None
    bases: dict[str, Any] = {name: _base(part) for name, part in linears.items()}
    shapes = tuple((name, base.in_features, base.out_features) for name, base in bases.items())
    key = (type(module), shapes, type(children[act_names[0]]), _plain_values(module))
    if key not in _RECOGNISED:
        candidates = _candidates(bases, act_names[0])
        _RECOGNISED[key] = next((parts for parts in candidates if _computes_mlp(module, parts, children[parts.act])), None)
    return _RECOGNISED[key]


# A module is recognised by its parts and results: the class's forward is tried on small random values. Any other module, and
# a module in another state (merged, several adapters, another dtype, with hooks), keeps its forward.
#: Result by class, shapes and settings, because layers repeat, and a search forecasts the same model many times.
_RECOGNISED: dict[Any, Any] = {}


def _base(module: nn.Module) -> nn.Module:
    return module.base_layer if type(module) in _LORA_TYPES else module  # type: ignore[return-value]


def _eps(module: Any) -> Any:
    return getattr(module, "variance_epsilon", getattr(module, "eps", None))


def _plain_values(module: nn.Module) -> tuple[Any, ...]:
    values = vars(module).items()
    plain = {name: str(value) for name, value in values if isinstance(value, (bool, int, float, str)) and name != "training"}
    return tuple(sorted(plain.items()))


def _candidates(bases: dict[str, Any], act: str) -> Iterator[GatedParts]:
    for names in itertools.permutations(bases):
        *entries, down = (bases[name] for name in names)
        # gate and up have the width of down's input, and fused twice that width
        width = down.in_features * (3 - len(entries))
        if all((entry.in_features, entry.out_features) == (down.out_features, width) for entry in entries):
            yield GatedParts(names, act, swapped=False)
            if len(entries) == 1:
                yield GatedParts(names, act, swapped=True)


class _StandIn:
    """A training-mode module with other parts."""

    def __init__(self, module: nn.Module, **parts: Any) -> None:
        # a loaded model is not in training mode yet
        vars(self).update(parts, module=module, training=True)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.module, name)


def _class_forward(module: nn.Module, parts: dict[str, Any], x: Tensor, *more: Any) -> Tensor | None:
    """Return the output of the class's forward with other parts, or None if it fails."""
    try:
        with torch.no_grad():
            out = type(module).forward(_StandIn(module, **parts), x, *more)  # type: ignore[arg-type]
    except Exception:  # noqa: BLE001 - arbitrary model code, which may need other inputs or parts
        return None
    return out if isinstance(out, Tensor) and out.dtype == x.dtype and out.shape == x.shape else None


def _computes_norm(module: Any, form: NormForm) -> bool:
    generator = torch.Generator().manual_seed(0)
    size = module.weight.shape[0]
    x, weight = torch.randn(1 + form.gated, 4, size, generator=generator), 1 + 0.3 * torch.randn(size, generator=generator)
    x[0, 2:] *= _eps(module) ** 0.5  # so small that eps matters
    # fp32 must agree up to rounding; in bf16 at most 1 % of the values may be rounded differently
    for dtype in (torch.float32, torch.bfloat16):
        inputs, scale = x.to(dtype), weight.to(dtype)
        theirs = _class_forward(module, {"weight": scale}, *inputs)
        if theirs is None:
            return False
        ours = _normed(form, *inputs, scale, _eps(module))
        close = torch.allclose(ours, theirs, rtol=2e-6 if dtype == torch.float32 else 1e-2, atol=1e-7)
        if not close or (dtype == torch.bfloat16 and (ours != theirs).float().mean() > 0.01):
            return False
    return True


def _computes_mlp(module: nn.Module, parts: GatedParts, act: Any) -> bool:
    required = [p for p in inspect.signature(type(module).forward).parameters.values() if p.default is p.empty]
    if len([p for p in required if p.kind is p.POSITIONAL_OR_KEYWORD]) != 2:  # self and x
        return False
    generator = torch.Generator().manual_seed(0)

    def linear(in_features: int, out_features: int) -> Any:
        # float64, so that only another formula can exceed the tolerance
        weight = torch.randn(out_features, in_features, generator=generator, dtype=torch.float64)
        return functools.partial(F.linear, weight=weight)

    *entries, down = parts.linears
    layers = {name: linear(6, 10 * (3 - len(entries))) for name in entries} | {down: linear(10, 6)}
    # a clipped activation differs at 30
    for scale in (0.1, 30.0):
        x = scale * torch.randn(2, 3, 6, generator=generator, dtype=torch.float64)
        gate, up = functions.split_gate_up([layers[name](x) for name in entries], parts.swapped)
        theirs = _class_forward(module, {**layers, parts.act: act}, x)
        if theirs is None or not _equal(layers[down](act(gate) * up), theirs):
            return False
    return True


def _activation(act: nn.Module) -> Activation | None:
    key = (type(act), _plain_values(act))
    if key not in _RECOGNISED:
        x = torch.linspace(-12, 12, 97, dtype=torch.float64)
        theirs = None if next(act.parameters(), None) is not None else _class_forward(act, {}, x)
        matches = (entry for entry in _ACTIVATIONS if theirs is not None and _equal(entry.forward(x), theirs))
        _RECOGNISED[key] = next(matches, None)
    return _RECOGNISED[key]


def _equal(ours: Tensor, theirs: Tensor) -> bool:
    return torch.allclose(ours, theirs, rtol=1e-9, atol=1e-12)
