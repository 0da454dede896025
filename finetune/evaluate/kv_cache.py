"""Measure the KV cache's bytes per token on the model, and the tokens that fit in memory."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import psutil
import torch

from finetune.model.build import build_on_meta
from finetune.model.new_tokens import embedding_rows
from finetune.model.quantisation import model_dtype
from finetune.model.transformers_config import load_config
from finetune.planner.plan import Plan
from finetune.settings import Settings
from finetune.units import format_bytes

#: A CPU is slower with more tokens than its caches hold, and a small batch ends early.
_MAX_TOKENS = {"cpu": 8_192, "cuda": 131_072}
_FREE_SHARE = 0.7  # of the free memory; growing a layer's cache copies it, and activations need some
_SHORT, _LONG = 8, 40
#: Tokens of a batch whose loss is computed, fewer where its float32 logits would be more than 256 MiB.
_LOSS_TOKENS, _LOGITS = 1_024, 64 * 2**20


def batch_token_limit(model: Any, device: str, budget_bytes: int | None = None) -> int:
    """Return the prompt and answer tokens, with padding, that fit beside the model; at least 1."""
    bytes_per_token, most = token_bytes(model, device), _MAX_TOKENS[device]
    if not bytes_per_token:
        return most
    return max(1, min(most, int(_FREE_SHARE * _free_bytes(device, budget_bytes) / bytes_per_token)))


def loss_batch_tokens(model: Any) -> int:
    """Return the tokens of a batch whose loss is computed."""
    return min(_LOSS_TOKENS, _LOGITS // embedding_rows(model))


@torch.inference_mode()
def token_bytes(model: Any, device: str) -> float:
    """Return the bytes per token of an answered row."""
    cache_bytes, compute_bytes = {}, 0.0
    for length in (_SHORT, _LONG):
        if device == "cuda":
            torch.cuda.synchronize()
            torch.cuda.reset_peak_memory_stats()
            allocated = torch.cuda.memory_allocated()
        output = model(input_ids=torch.ones((1, length), dtype=torch.long, device=device), use_cache=True)
        cache = getattr(output, "cache" if hasattr(output, "cache") else "past_key_values", None)  # `cache` from 5.24 on
        cache_bytes[length] = sum(tensor.numel() * tensor.element_size() for tensor in _tensors(cache))
        if device == "cuda":
            compute_bytes = (torch.cuda.max_memory_allocated() - allocated) / length
    # on a GPU, computing a token can take more than its KV cache
    return max((cache_bytes[_LONG] - cache_bytes[_SHORT]) / (_LONG - _SHORT), compute_bytes)


def cache_token_bytes(settings: Settings) -> float | None:
    """Return the KV cache's bytes per token before the model is loaded; None if unknown."""
    try:
        model = build_on_meta(load_config(settings), None, dtype=model_dtype(settings), attention=None)
        return token_bytes(model.eval(), "meta")
    except (RuntimeError, ValueError, TypeError, NotImplementedError, AttributeError):  # it needs the values of a tensor
        return None


@dataclass(frozen=True)
class ChatMemory:
    """Memory of a chat."""

    #: The loaded model, by the run's forecast.
    model_bytes: int | None
    #: The KV cache of `tokens`.
    cache_bytes: int | None
    tokens: int
    free_bytes: int

    @property
    def fits(self) -> bool:
        return (self.model_bytes or 0) + (self.cache_bytes or 0) <= self.free_bytes

    def summary(self) -> str:
        model, cache = (
            "unknown" if size is None else format_bytes(size) for size in (self.model_bytes, self.cache_bytes)
        )  # fmt: skip
        fits = "" if self.fits else ": it may not fit"
        return f"model {model}, KV cache of {self.tokens:,} tokens {cache}; {format_bytes(self.free_bytes)} free{fits}"


def chat_memory(plan: Plan, max_new_tokens: int) -> ChatMemory:
    """Forecast a chat of max_length tokens and an answer."""
    tokens = plan.settings.max_length + max_new_tokens
    peaks = plan.forecast.peaks if plan.forecast else {}
    bytes_per_token = cache_token_bytes(plan.settings)
    free = min(plan.card.free_bytes, plan.budget_bytes or plan.card.free_bytes)
    if plan.card.is_cpu or torch.cuda.is_available():
        free = _free_bytes("cpu" if plan.card.is_cpu else "cuda", plan.budget_bytes)
    return ChatMemory(peaks.get("load"), round(bytes_per_token * tokens) if bytes_per_token is not None else None, tokens, free)


def run_halving(rows: list[int], work: Any) -> None:
    """Call `work(rows)`, and with half of the rows when GPU memory runs out. Raise the error of a single row."""
    try:
        work(rows)
    except torch.OutOfMemoryError:
        if len(rows) == 1:
            raise
        torch.cuda.empty_cache()
    else:
        return
    for half in (rows[: len(rows) // 2], rows[len(rows) // 2 :]):
        run_halving(half, work)


def _free_bytes(device: str, budget_bytes: int | None) -> int:
    if device == "cpu":
        return psutil.virtual_memory().available
    # tensors can use the allocator's reserved memory
    free = torch.cuda.mem_get_info()[0] + torch.cuda.memory_reserved()
    return min(free, budget_bytes or free) - torch.cuda.memory_allocated()


def _tensors(value: Any, depth: int = 4) -> Iterator[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        yield value
    elif depth and value is not None:
        values = value if isinstance(value, dict) else getattr(value, "__dict__", {})
        for item in value if isinstance(value, (list, tuple)) else values.values():
            yield from _tensors(item, depth - 1)
