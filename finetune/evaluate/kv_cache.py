"""Measure the model's KV cache per token, and how many tokens fit in memory."""

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

#: Most tokens of a batch. On a CPU, more tokens than its caches hold are slower, and a small batch ends early.
_MAX_TOKENS = {"cpu": 8_192, "cuda": 131_072}
_FREE_SHARE = 0.7  # of the free memory; growing a layer's cache copies it, and activations need some
_SHORT, _LONG = 8, 40  # tokens of the two measured inputs
_LOSS_TOKENS = 1_024  # of a batch whose loss is computed
_MAX_LOGITS = 64 * 2**20  # of such a batch: 256 MiB in float32


def batch_token_limit(model: Any, device: str, budget_bytes: int | None = None) -> int:
    """Return the prompt and answer tokens, with padding, that fit beside the model; at least 1."""
    bytes_per_token, max_tokens = token_bytes(model, device), _MAX_TOKENS[device]
    if not bytes_per_token:
        return max_tokens
    return max(1, min(max_tokens, int(_FREE_SHARE * _free_bytes(device, budget_bytes) / bytes_per_token)))


def loss_batch_tokens(model: Any) -> int:
    """Return the tokens of a batch whose loss is computed."""
    return min(_LOSS_TOKENS, _MAX_LOGITS // embedding_rows(model))


@torch.inference_mode()
def token_bytes(model: Any, device: str) -> float:
    """Return the bytes that generation takes for each token."""
    cache_bytes, peak_bytes_per_token = {}, 0.0
    for length in (_SHORT, _LONG):
        if device == "cuda":
            torch.cuda.synchronize()
            torch.cuda.reset_peak_memory_stats()
            allocated = torch.cuda.memory_allocated()
        output = model(input_ids=torch.ones((1, length), dtype=torch.long, device=device), use_cache=True)
        # named `cache` from transformers 5.24 on
        cache = getattr(output, "cache" if hasattr(output, "cache") else "past_key_values", None)
        cache_bytes[length] = sum(tensor.numel() * tensor.element_size() for tensor in _tensors(cache))
        if device == "cuda":
            peak_bytes_per_token = (torch.cuda.max_memory_allocated() - allocated) / length
    # the difference leaves out what a cache has at any length; on a GPU, computing a token can take more than its KV cache
    return max((cache_bytes[_LONG] - cache_bytes[_SHORT]) / (_LONG - _SHORT), peak_bytes_per_token)


def cache_token_bytes(settings: Settings) -> float | None:
    """Return the KV cache's bytes per token before the model is loaded; None if unknown."""
    try:
        model = build_on_meta(load_config(settings), None, dtype=model_dtype(settings), attention=None)
        return token_bytes(model.eval(), "meta")
    except (RuntimeError, ValueError, TypeError, NotImplementedError, AttributeError):
        return None  # a model that reads values of tensors can't run on the meta device


@dataclass(frozen=True)
class ChatMemory:
    """Memory of a chat."""

    model_bytes: int | None  # of the loaded model, by the run's forecast
    cache_bytes: int | None  # of the KV cache of `tokens`
    tokens: int
    free_bytes: int

    @property
    def fits(self) -> bool:
        return (self.model_bytes or 0) + (self.cache_bytes or 0) <= self.free_bytes

    def summary(self) -> str:
        sizes = (self.model_bytes, self.cache_bytes)
        model, cache = ("unknown" if size is None else format_bytes(size) for size in sizes)
        warning = "" if self.fits else ": it may not fit"
        return f"model {model}, KV cache of {self.tokens:,} tokens {cache}; {format_bytes(self.free_bytes)} free{warning}"


def chat_memory(plan: Plan, max_new_tokens: int) -> ChatMemory:
    """Forecast a chat of max_length tokens and an answer."""
    tokens = plan.settings.max_length + max_new_tokens
    model_bytes = plan.forecast.peaks.get("load") if plan.forecast else None
    bytes_per_token = cache_token_bytes(plan.settings)
    free_bytes = min(plan.card.free_bytes, plan.budget_bytes or plan.card.free_bytes)
    if plan.card.is_cpu or torch.cuda.is_available():
        free_bytes = _free_bytes("cpu" if plan.card.is_cpu else "cuda", plan.budget_bytes)
    cache_bytes = None if bytes_per_token is None else round(bytes_per_token * tokens)
    return ChatMemory(model_bytes, cache_bytes, tokens, free_bytes)


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
    # not in `except`, where the error would keep the failed call's tensors alive
    for half in (rows[: len(rows) // 2], rows[len(rows) // 2 :]):
        run_halving(half, work)


def _free_bytes(device: str, budget_bytes: int | None) -> int:
    if device == "cpu":
        return psutil.virtual_memory().available
    # tensors can use the allocator's reserved memory
    usable_bytes = torch.cuda.mem_get_info()[0] + torch.cuda.memory_reserved()
    return min(usable_bytes, budget_bytes or usable_bytes) - torch.cuda.memory_allocated()


def _tensors(value: Any, depth: int = 4) -> Iterator[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        yield value
    elif depth and value is not None:
        values = value if isinstance(value, dict) else getattr(value, "__dict__", {})
        for item in value if isinstance(value, (list, tuple)) else values.values():
            yield from _tensors(item, depth - 1)
