"""`attn_implementation: torch_varlen`: packed examples through torch's variable-length flash attention."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor
from torch.nn.attention.varlen import varlen_attn
from torch.utils.weak import WeakTensorKeyDictionary
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import sdpa_mask

from finetune.compat.torch import varlen_shares_keys
from finetune.errors import RecipeError
from finetune.layers.host_memory import is_in_forecast

# `sdpa` is correct on packed examples, but needs a dense tokens x tokens mask, which excludes the flash kernel. This passes
# the boundaries (`cu_seq_lens_q`, from TRL's collator) to `torch.nn.attention.varlen`. Without CUDA, in fp32 or on GPUs older
# than Ampere, scaled dot product attention runs once per example; padded batches and generation use `sdpa`.
NAME = "torch_varlen"


def register() -> None:
    """Register the attention with transformers, before a model is built."""
    AttentionInterface.register(NAME, varlen_attention)
    AttentionMaskInterface.register(NAME, varlen_mask)


def varlen_mask(
    batch_size: int, q_length: int, kv_length: int, *, attention_mask: Tensor | None = None, **arguments: Any
) -> Tensor | None:
    """Return None for a batch without padding, else sdpa's mask, (batch, 1, q_length, kv_length)."""
    if attention_mask is None and q_length == kv_length:
        return None
    return sdpa_mask(batch_size, q_length, kv_length, attention_mask=attention_mask, **arguments)


def varlen_attention(
    module: torch.nn.Module, query: Tensor, key: Tensor, value: Tensor,
    attention_mask: Tensor | None, dropout: float = 0.0, scaling: float | None = None, **arguments: Any,
) -> tuple[Tensor, None]:  # fmt: skip
    """Return causal attention within each example, (batch, tokens, heads, head_dim), for (batch, heads, tokens, head_dim).

    Raises RecipeError for dropout, soft caps and attention sinks, which the kernel does not support.
    """
    _refuse_unsupported(dropout, arguments)
    batch, _, tokens, _ = query.shape
    if attention_mask is not None or tokens != key.shape[2] or not getattr(module, "is_causal", True):
        return sdpa_attention_forward(module, query, key, value, attention_mask, dropout=dropout, scaling=scaling, **arguments)
    boundaries, longest = _example_boundaries(query, arguments)
    # (batch * tokens, heads, head_dim)
    q, k, v = (x.transpose(1, 2).reshape(batch * tokens, x.shape[1], x.shape[3]) for x in (query, key, value))
    window = arguments.get("sliding_window")
    if _has_kernel(query, value):
        window_size = (window - 1 if window else -1, 0)  # tokens before and after; -1 is unlimited
        queries_per_key = query.shape[1] // key.shape[1]
        gqa: dict[str, Any] = {"enable_gqa": True} if queries_per_key > 1 else {}
        if gqa and not varlen_shares_keys():
            gqa, k, v = {}, k.repeat_interleave(queries_per_key, dim=1), v.repeat_interleave(queries_per_key, dim=1)
        out = varlen_attn(q, k, v, boundaries, boundaries, longest, longest, scale=scaling, window_size=window_size, **gqa)
    else:
        out = _example_by_example(q, k, v, boundaries, scaling, window)
    assert isinstance(out, Tensor)
    return out.view(batch, tokens, *out.shape[1:]), None


def _refuse_unsupported(dropout: float, arguments: dict[str, Any]) -> None:
    features = {
        "attention dropout": dropout > 0, "soft caps": arguments.get("softcap"), "attention sinks": arguments.get("s_aux"),
    }  # fmt: skip
    problems = [
        f"attn_implementation {NAME} does not support {name}, which this model uses"
        for name, value in features.items()
        if value is not None and value is not False
    ]
    if problems:
        raise RecipeError(problems, "Set attn_implementation=eager.")


#: Boundaries by position ids, and their values on the host by boundaries: all layers of a micro-batch share one read, because
#: reading waits for the GPU.
_BOUNDARIES, _HOST_OFFSETS = WeakTensorKeyDictionary(), WeakTensorKeyDictionary()


def _example_boundaries(query: Tensor, arguments: dict[str, Any]) -> tuple[Tensor, int]:
    """Return the offsets of the examples (examples + 1, int32) in the flattened batch, and the longest length."""
    batch, _, tokens, _ = query.shape
    boundaries = arguments.get("cu_seq_lens_q")
    if boundaries is not None:
        longest = arguments["max_length_q"]
        return boundaries.to(query.device), longest.shape[0] if isinstance(longest, Tensor) else longest
    positions = arguments.get("position_ids")
    if positions is None or positions.shape != (batch, tokens) or is_in_forecast(query):
        return torch.arange(0, (batch + 1) * tokens, tokens, dtype=torch.int32, device=query.device), tokens
    if positions not in _BOUNDARIES:
        # position ids restart at 0 in each example
        offsets = [*(positions.flatten() == 0).nonzero().flatten().tolist(), positions.numel()]
        boundaries = torch.tensor(offsets, dtype=torch.int32, device=positions.device)
        _BOUNDARIES[positions] = boundaries, max(end - start for start, end in pairwise(offsets))
        _HOST_OFFSETS[boundaries] = offsets
    return _BOUNDARIES[positions]


_CPU = (0, 0)
#: Compute capabilities of nested `forecast_for`; Ampere outside.
_FORECAST_CAPABILITIES = [(8, 0)]


@contextmanager
def forecast_for(capability: tuple[int, int] | None) -> Iterator[None]:
    """Forecast for a GPU of this compute capability; None for the CPU."""
    _FORECAST_CAPABILITIES.append(capability or _CPU)
    try:
        yield
    finally:
        _FORECAST_CAPABILITIES.pop()


def _has_kernel(query: Tensor, value: Tensor) -> bool:
    head_dim = query.shape[-1]
    # flash attention's limits: 16 bit, one head_dim, a multiple of 8 up to 256, compute capability 8.0
    if query.dtype not in (torch.bfloat16, torch.float16) or head_dim > 256 or head_dim % 8:
        return False
    if value.shape[-1] != head_dim:  # latent attention (DeepSeek)
        return False
    if is_in_forecast(query):
        capability = _FORECAST_CAPABILITIES[-1]
    else:
        capability = compute_capability(query.device) or _CPU
    return capability >= (8, 0) and flash_supports_backward(head_dim, capability)


def compute_capability(device: torch.device) -> tuple[int, int] | None:
    """Return the compute capability of an NVIDIA GPU; None for CPU and ROCm."""
    # ROCm's numbers in torch mean something else
    return torch.cuda.get_device_capability(device) if device.type == "cuda" and torch.version.cuda else None


def flash_supports_backward(head_dim: int, capability: tuple[int, int]) -> bool:
    """Return whether flash attention's backward, without dropout, supports `head_dim` (at most 256)."""
    # a head_dim over 192 and up to 224 needs more shared memory than sm86 to sm89 and sm120 to sm121 have; 256 has a separate
    # kernel there (aten/src/ATen/native/transformers/cuda/sdp_utils.cpp,
    # check_requires_grad_and_head_dim_gt192_constraints_on_sm86_89_or_120; flash_attn/flash_api.cpp, mha_varlen_bwd)
    has_little_memory = (8, 6) <= capability <= (8, 9) or (12, 0) <= capability <= (12, 1)
    return not (has_little_memory and 192 < head_dim <= 224)


def _example_by_example(
    query: Tensor, key: Tensor, value: Tensor, boundaries: Tensor, scaling: float | None, window: int | None
) -> Tensor:
    if is_in_forecast(boundaries):
        # tensors in a forecast have no values: assume examples of equal length
        tokens, examples = len(query), len(boundaries) - 1
        offsets = [example * tokens // examples for example in range(examples + 1)]
    else:
        if boundaries not in _HOST_OFFSETS:
            _HOST_OFFSETS[boundaries] = boundaries.tolist()
        offsets = _HOST_OFFSETS[boundaries]
    outs = []
    for start, end in pairwise(offsets):
        q, k, v = (x[start:end].transpose(0, 1).unsqueeze(0) for x in (query, key, value))
        mask = _window_mask(end - start, window, query.device) if window and window < end - start else None
        out = torch.nn.functional.scaled_dot_product_attention(
            q, k, v, attn_mask=mask, is_causal=mask is None, scale=scaling, enable_gqa=q.shape[1] != k.shape[1]
        )
        outs.append(out.squeeze(0).transpose(0, 1))
    return torch.cat(outs)


def _window_mask(tokens: int, window: int, device: torch.device) -> Tensor:
    index = torch.arange(tokens, device=device)
    distance = index.unsqueeze(1) - index
    return (distance >= 0) & (distance < window)
