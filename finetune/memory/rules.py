"""Rules for the workspace of CUDA kernels, each with its source."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from finetune.layers.compiled import BODIES
from finetune.layers.host_memory import round_up
from finetune.layers.nf4 import dequantising_linear
from finetune.layers.varlen_attention import flash_supports_backward
from finetune.memory.tracker import Keywords, Positional, Rule, StorageTracker
from finetune.units import KIB, MIB

# Fake tensors don't show the buffers that a kernel allocates and frees inside one operator. Further corrections are the cuBLAS
# workspace and `card_semantics` (dropout masks, TRL's in-place Triton tiles, int8 matmuls, autocast).
Capability = tuple[int, int]
#: Returns the bytes of the buffers that a kernel allocates and frees, from its arguments.
ScratchSizes = Callable[[Positional, Keywords], list[int]]


def rules_for(capability: Capability | None) -> dict[Any, Rule]:
    """Return operator -> rule for a GPU of this compute capability, or for the CPU (None)."""
    import torch.nn.attention.varlen  # registers its operators
    from bitsandbytes.backends.default.ops import _gemm_4bit_default_impl

    operators = torch.ops.bitsandbytes
    cpu_rules: dict[Any, Rule] = {
        # the search for outliers depends on data, which fake tensors lack
        operators.int8_vectorwise_quant.default: _int8_quantise,
        operators.int8_mixed_scaled_mm.default: _int8_matmul,
        operators.int8_scaled_mm.default: _int8_matmul,
        **{operator: functools.partial(_run_body, body) for operator, body in BODIES.items()},
    }
    if capability is None:
        return cpu_rules
    rules: dict[str, Rule] = {
        # grad x output, as large as the attention scores (native/cuda/SoftMax.cu, softmax_backward_cuda_out)
        "aten._softmax_backward_data": functools.partial(_with_scratch, lambda args, _kwargs: [args[0].nbytes]),
        "aten._softmax": _softmax,
        "aten._scaled_dot_product_flash_attention_for_cpu_backward": functools.partial(
            _with_scratch, functools.partial(_attention_scratch, capability)
        ),
        "torch_attn._varlen_attn_backward": functools.partial(
            _with_scratch, lambda args, _kwargs: _flash_scratch(args[1], args[2], args[6].shape[0] - 1)
        ),
        # More than 512 tokens dequantise the whole weight; for fewer this is an upper bound
        # (bitsandbytes/backends/cuda/ops.py, gemm_4bit; backends/default/ops.py, _gemm_4bit_default_impl).
        "bitsandbytes.gemm_4bit": functools.partial(_run_body, _gemm_4bit_default_impl),
        "finetune.few_token_linear": functools.partial(_run_body, dequantising_linear),
    }
    by_operator = {functools.reduce(getattr, name.split("."), torch.ops).default: rule for name, rule in rules.items()}
    return {**cpu_rules, **by_operator}


def cublas_workspace_bytes(capability: Capability | None) -> int:
    """Return the workspace per cuBLAS handle: :4096:2:16:8 before Hopper, 32 MiB from Hopper on, none on the CPU."""
    # aten/src/ATen/cuda/CublasHandlePool.cpp, parseChosenWorkspaceSize
    if capability is None:
        return 0
    return 32 * MIB if capability >= (9, 0) else 2 * 4096 * KIB + 8 * 16 * KIB


def _with_scratch(sizes: ScratchSizes, tracker: StorageTracker, func: Any, args: Positional, kwargs: Keywords) -> Any:
    out = func(*args, **kwargs)
    for tensor in out if isinstance(out, tuple) else (out,):
        tracker.track(tensor)
    tracker.scratch(*sizes(args, kwargs))
    return out


def _softmax(_tracker: StorageTracker, func: Any, args: Positional, kwargs: Keywords) -> Any:
    # CUDA's fp32 softmax reads 16-bit scores directly; the CPU copies them to fp32 first (SoftMax.cpp, half_to_float on CUDA)
    return torch.empty_like(args[0], dtype=torch.float32) if args[2] else func(*args, **kwargs)


def _run_body(body: Any, tracker: StorageTracker, _func: Any, args: Positional, kwargs: Keywords) -> Any:
    # the body's temporary tensors are workspace, its outputs are not
    with tracker, tracker.tagging("workspace"):
        out = body(*args, **kwargs)
    for tensor in out if isinstance(out, tuple) else (out,):
        tracker.retag(tensor, tracker.part)
    return out


def _int8_quantise(tracker: StorageTracker, _func: Any, args: Positional, kwargs: Keywords) -> Any:
    # the search for outliers allocates magnitudes and a mask; outlier columns, which are few, are not forecast
    # (bitsandbytes/backends/cuda/ops.py, int8_vectorwise_quant)
    values, threshold = args[0], kwargs.get("threshold") or (args[1] if len(args) > 1 else 0.0)
    with tracker, tracker.tagging("workspace"):
        codes = values.new_empty(values.shape, dtype=torch.int8)
        scales = values.new_empty((values.numel() // values.shape[-1],), dtype=torch.float32)
        outliers = values.new_empty((0,), dtype=torch.int64) if threshold > 0 else None
    if threshold > 0:
        tracker.scratch(values.nbytes, values.numel())
    return codes, scales, outliers


def _int8_matmul(tracker: StorageTracker, func: Any, args: Positional, kwargs: Keywords) -> Any:
    # sums in int32, then fp16, then the compute dtype
    # (bitsandbytes/backends/cuda/ops.py, int8_linear_matmul and int8_mm_dequant)
    is_mixed = func is torch.ops.bitsandbytes.int8_mixed_scaled_mm.default
    codes, weight = args[1:3] if is_mixed else args[:2]
    dtype = args[0].dtype if is_mixed else kwargs.get("dtype") or torch.float16
    shape = (*codes.shape[:-1], weight.shape[0])
    with tracker, tracker.tagging("workspace"):
        sums = codes.new_empty(shape, dtype=torch.int32)  # int8_scaled_mm keeps them until the result exists
        out = codes.new_empty(shape, dtype=torch.float16).to(dtype)
        del sums
    return (out, codes.new_empty((0,), dtype=dtype)) if is_mixed else out  # a mixed matmul also returns the outlier columns


def _attention_scratch(capability: Capability, args: Positional, kwargs: Keywords) -> list[int]:
    query, key, mask = args[1], args[2], kwargs.get("attn_mask")
    if uses_flash(query.dtype, query.shape[-1], mask is not None, capability):
        return _flash_scratch(query, key)
    return _efficient_scratch(query, key, capability)


def uses_flash(dtype: torch.dtype, head_dim: int, has_mask: bool, capability: Capability) -> bool:
    """Tell whether scaled dot product attention uses the flash kernel, not the memory-efficient kernel (sdp_utils.cpp)."""
    is_supported = dtype in (torch.float16, torch.bfloat16) and head_dim <= 256
    # cuDNN's kernel comes last: a run sets TORCH_CUDNN_SDPA_DEPRIORITIZED (finetune.run.supervise)
    return capability >= (8, 0) and is_supported and flash_supports_backward(head_dim, capability) and not has_mask


def _flash_scratch(query: Tensor, key: Tensor, packed_rows: int = 0) -> list[int]:
    heads, dim = query.shape[1], query.shape[-1]
    # each packed row is padded by 128 tokens (flash_api.cpp, mha_varlen_bwd), each other row to a multiple of 128
    padded = query.shape[0] + 128 * packed_rows if packed_rows else query.shape[0] * round_up(query.shape[2], 128)
    # softmax_d and dq_accum in fp32; with grouped queries also dk and dv of every query head (flash_api.cpp, mha_bwd)
    sizes = [heads * padded * 4, heads * padded * round_up(dim, 32 if dim <= 128 else 64) * 4]
    if key.shape[1] != heads:
        sizes += [key.numel() // key.shape[1] * heads * query.element_size()] * 2
    return sizes


def _efficient_scratch(query: Tensor, key: Tensor, capability: Capability) -> list[int]:
    batch, heads, tokens, dim = query.shape
    is_16_bit = query.element_size() == 2
    block_rows, block_columns = _efficient_block(is_16_bit, dim, capability)
    # delta and the fp32 accumulators of dq; for 16-bit inputs also of dk and dv unless in registers (kernel_backward.h)
    elements = -(-tokens // block_rows) * -(-dim // block_columns) * (4 + block_rows * block_columns)
    if is_16_bit and dim > block_rows:
        key_splits = max(1, min(-(-key.shape[2] // block_columns), 200 // (batch * heads)))
        elements += 2 * key_splits * block_columns * round_up(dim, block_rows)
    return [batch * heads * tokens * 4, batch * heads * round_up(elements, 4) * 4]


def _efficient_block(is_16_bit: bool, dim: int, capability: Capability) -> tuple[int, int]:
    """Return (rows, columns) of the kernel's block: the first in kernels/cutlassB.h that fits the GPU's shared memory."""
    # A100, H100 and B200 have 163 KiB and more for a block; GeForce and workstation cards have 99 KiB
    has_large_blocks = capability == (8, 0) or (9, 0) <= capability < (12, 0)
    if dim <= 64 or (not is_16_bit and not has_large_blocks):
        return 64, 64
    if not is_16_bit or capability < (8, 0) or dim > 128 or (dim <= 96 and capability in ((8, 6), (8, 9))):
        return 128, 64
    return (128, 128) if has_large_blocks else (64, 64)
