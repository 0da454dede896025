"""Workspace of CUDA kernels, which fake tensors don't show: a table of named rules, each with its source.

A dry run sees every tensor, but not the temporary buffers that a kernel allocates and frees inside one operator.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from finetune.layers.varlen_attention import flash_supports_backward
from finetune.memory.tracker import Rule, StorageTracker
from finetune.units import KIB, MIB

Capability = tuple[int, int]


@dataclass(frozen=True)
class NamedRule:
    """One correction: what a kernel allocates, the source that says so, and the operators concerned."""

    name: str
    what: str
    source: str
    operators: tuple[str, ...]
    make: Callable[[Capability], Rule]


def rules_for(capability: Capability) -> dict[Any, Rule]:
    """Operator -> rule for a card of this compute capability."""
    import bitsandbytes  # noqa: F401  # registers its operators
    import torch.nn.attention.varlen  # noqa: F401

    return {_operator(name): rule.make(capability) for rule in RULES for name in rule.operators}


def rules_for_cpu() -> dict[Any, Rule]:
    """Operator -> rule for a run on the CPU: only int8, whose search for outliers depends on data."""
    import bitsandbytes  # noqa: F401  # registers its operators

    rules = [rule for rule in RULES if rule.make in (_int8_quantise, _int8_matmul)]
    return {_operator(name): rule.make((0, 0)) for rule in rules for name in rule.operators}


def cublas_workspace_bytes(capability: Capability) -> int:
    """Workspace that torch allocates per cuBLAS handle: :4096:2:16:8 before Hopper, 32 MiB from Hopper on.

    Source: aten/src/ATen/cuda/CublasHandlePool.cpp, parseChosenWorkspaceSize.
    """
    return 32 * MIB if capability >= (9, 0) else 2 * 4096 * KIB + 8 * 16 * KIB


def _softmax_backward(_capability: Capability) -> Rule:
    def rule(tracker: StorageTracker, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        out = func(*args, **kwargs)
        tracker.track(out)
        tracker.scratch("softmax backward", args[0].nbytes)
        return out

    return rule


def _softmax_half_to_float(_capability: Capability) -> Rule:
    def rule(_tracker: StorageTracker, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        values, dim, half_to_float = args
        return torch.empty_like(values, dtype=torch.float32) if half_to_float else func(values, dim, half_to_float, **kwargs)

    return rule


def _dequantised_matmul(_capability: Capability) -> Rule:
    from bitsandbytes.backends.default.ops import _gemm_4bit_default_impl

    def rule(tracker: StorageTracker, _func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        with tracker, tracker.tagging("workspace"):
            out = _gemm_4bit_default_impl(*args, **kwargs)
        tracker.retag(out, tracker.part)
        return out

    return rule


def _int8_quantise(_capability: Capability) -> Rule:
    def rule(tracker: StorageTracker, _func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        values, threshold = args[0], kwargs.get("threshold", args[1] if len(args) > 1 else 0.0)
        with tracker, tracker.tagging("workspace"):
            codes = values.new_empty(values.shape, dtype=torch.int8)
            scales = values.new_empty((values.numel() // values.shape[-1],), dtype=torch.float32)
            outliers = values.new_empty((0,), dtype=torch.int64) if threshold > 0 else None
        if threshold > 0:
            tracker.scratch("int8 outliers", values.nbytes, values.numel())
        return codes, scales, outliers

    return rule


def _int8_matmul(_capability: Capability) -> Rule:
    def rule(tracker: StorageTracker, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        mixed = func is _operator("bitsandbytes::int8_mixed_scaled_mm.default")
        codes, weight = args[1:3] if mixed else args[:2]
        dtype = args[0].dtype if mixed else kwargs.get("dtype") or torch.float16
        shape = (*codes.shape[:-1], weight.shape[0])
        with tracker, tracker.tagging("workspace"):
            sums = codes.new_empty(shape, dtype=torch.int32)  # held by int8_scaled_mm until it has the result
            out = codes.new_empty(shape, dtype=torch.float16).to(dtype)
            del sums
        return (out, codes.new_empty((0,), dtype=dtype)) if mixed else out

    return rule


def _attention_backward(capability: Capability) -> Rule:
    def rule(tracker: StorageTracker, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        grads = func(*args, **kwargs)
        query, key, mask = args[1], args[2], kwargs.get("attn_mask")
        for grad in grads:
            tracker.track(grad)
        if uses_flash(query.dtype, query.shape[-1], mask is not None, capability):
            tracker.scratch("flash attention backward", *_flash_scratch(query, key))
        else:
            tracker.scratch("efficient attention backward", *_efficient_scratch(query, key, capability))
        return grads

    return rule


def uses_flash(dtype: torch.dtype, head_dim: int, masked: bool, capability: Capability) -> bool:
    """Whether scaled dot product attention uses the flash kernel (sdp_utils.cpp); if not, the memory-efficient one.

    cuDNN's comes last: a run sets TORCH_CUDNN_SDPA_DEPRIORITIZED (finetune.run.supervise).
    """
    supported = dtype in (torch.float16, torch.bfloat16) and head_dim <= 256 and flash_supports_backward(head_dim, capability)
    return capability >= (8, 0) and supported and not masked


def _flash_scratch(query: torch.Tensor, key: torch.Tensor) -> list[int]:
    """softmax_d and dq_accum in fp32; with grouped queries also dk and dv of every query head (flash_api.cpp, mha_bwd)."""
    batch, heads, tokens, dim = query.shape
    rows, columns = _up(tokens, 128), _up(dim, 32 if dim <= 128 else 64)
    sizes = [batch * heads * rows * 4, batch * heads * rows * columns * 4]
    if key.shape[1] != heads:
        sizes += [batch * key.shape[2] * heads * dim * query.element_size()] * 2
    return sizes


def _efficient_scratch(query: torch.Tensor, key: torch.Tensor, capability: Capability) -> list[int]:
    """delta and the fp32 accumulators of dq, and in 16 bit of dk and dv unless they stay in registers (kernel_backward.h)."""
    batch, heads, tokens, dim = query.shape
    is_16_bit = query.element_size() == 2
    block_rows, block_columns = _efficient_block(is_16_bit, dim, capability)
    elements = -(-tokens // block_rows) * -(-dim // block_columns) * (4 + block_rows * block_columns)
    if is_16_bit and dim > block_rows:
        key_splits = max(1, min(-(-key.shape[2] // block_columns), 200 // (batch * heads)))
        elements += 2 * key_splits * block_columns * _up(dim, block_rows)
    return [batch * heads * tokens * 4, batch * heads * _up(elements, 4) * 4]


def _efficient_block(half: bool, dim: int, capability: Capability) -> tuple[int, int]:
    """Rows and columns of a block of the kernel: the first one of kernels/cutlassB.h whose shared memory the GPU has."""
    large = _has_large_shared_memory(capability)
    if dim <= 64 or (not half and not large):
        return 64, 64
    if not half or capability < (8, 0) or dim > 128 or (dim <= 96 and capability in ((8, 6), (8, 9))):
        return 128, 64
    return (128, 128) if large else (64, 64)


def _has_large_shared_memory(capability: Capability) -> bool:
    """A100, H100 and B200: 163 KiB and more for a block; GeForce and workstation cards have 99 KiB."""
    return capability == (8, 0) or (9, 0) <= capability < (12, 0)


def _up(value: int, multiple: int) -> int:
    return -(-value // multiple) * multiple


def _varlen_backward(_capability: Capability) -> Rule:
    def rule(tracker: StorageTracker, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        grads = func(*args, **kwargs)
        query, key = args[1], args[2]
        for grad in grads:
            tracker.track(grad)
        (tokens, heads, dim), rows = query.shape, args[6].shape[0] - 1
        padded, columns = tokens + 128 * rows, _up(dim, 32 if dim <= 128 else 64)
        sizes = [heads * padded * 4, heads * padded * columns * 4]
        if key.shape[1] != heads:
            sizes += [key.shape[0] * heads * dim * query.element_size()] * 2
        tracker.scratch("varlen attention backward", *sizes)
        return grads

    return rule


def _operator(name: str) -> Any:
    """The operator overload of a name such as `aten::_softmax.default`."""
    namespace, _, qualified = name.partition("::")
    packet, _, overload = qualified.partition(".")
    return getattr(getattr(getattr(torch.ops, namespace), packet), overload)


#: Corrections to single operators. `cublas_workspace_bytes` and `card_semantics` (dropout masks, TRL's in-place Triton tiles,
#: int8 matmuls, autocast) have the others.
RULES = (
    NamedRule(
        "softmax backward scratch",
        "softmax's backward first computes grad x output, as large as the attention scores",
        "aten/src/ATen/native/cuda/SoftMax.cu, softmax_backward_cuda_out",
        ("aten::_softmax_backward_data.default",),
        _softmax_backward,
    ),
    NamedRule(
        "fp32 softmax of 16-bit scores",
        "softmax(dtype=float32) reads 16-bit scores directly; the CPU first copies them to fp32",
        "aten/src/ATen/native/SoftMax.cpp, at::softmax with half_to_float on CUDA",
        ("aten::_softmax.default",),
        _softmax_half_to_float,
    ),
    NamedRule(
        "attention backward scratch",
        "fp32 accumulators of flash or memory-efficient attention's backward",
        "flash_attn/flash_api.cpp, mha_bwd; mem_eff_attention/kernel_backward.h, workspace_size",
        ("aten::_scaled_dot_product_flash_attention_for_cpu_backward.default",),
        _attention_backward,
    ),
    NamedRule(
        "varlen attention backward scratch",
        "fp32 accumulators of flash attention's backward over packed rows, padded by 128 tokens a row",
        "flash_attn/flash_api.cpp, mha_varlen_bwd",
        ("torch_attn::_varlen_attn_backward.default",),
        _varlen_backward,
    ),
    NamedRule(
        "bitsandbytes dequantisation",
        "a 4-bit matmul of more than 512 tokens dequantises the whole weight; for fewer this is an upper bound",
        "bitsandbytes/backends/cuda/ops.py, gemm_4bit; backends/default/ops.py, _gemm_4bit_default_impl",
        ("bitsandbytes::gemm_4bit.default",),
        _dequantised_matmul,
    ),
    NamedRule(
        "int8 quantisation of activations",
        "the search for outliers allocates magnitudes and a mask; outlier columns, which are few, are not forecast",
        "bitsandbytes/backends/cuda/ops.py, int8_vectorwise_quant",
        ("bitsandbytes::int8_vectorwise_quant.default",),
        _int8_quantise,
    ),
    NamedRule(
        "int8 matmul",
        "sums in int32, then fp16, then the compute dtype",
        "bitsandbytes/backends/cuda/ops.py, int8_linear_matmul and int8_mm_dequant",
        ("bitsandbytes::int8_mixed_scaled_mm.default", "bitsandbytes::int8_scaled_mm.default"),
        _int8_matmul,
    ),
)
