"""How many tokens are answered at once: what the free memory holds of the model's own cache, measured on it."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import psutil
import torch

from finetune.units import format_bytes

if TYPE_CHECKING:
    from finetune.plan.plan import Plan
    from finetune.recipe import Settings

#: A processor is slower with more than its caches hold, and a small batch ends early.
_MOST_TOKENS = {"cpu": 8_192, "cuda": 131_072}
_SHARE = 0.7  # of the free memory; growing a layer's cache copies it, and what is computed needs some
_SHORT, _LONG = 8, 40


def tokens_at_once(model: Any, device: str, budget_bytes: int | None = None) -> int:
    """Prompt and answer tokens that fit beside the loaded model, with their padding; 1 or more.

    `budget_bytes`: the most that this process may have on the card.
    """
    each = token_bytes(model, device)
    free = _free_bytes(device, budget_bytes)
    return max(1, min(_MOST_TOKENS[device], int(_SHARE * free / each))) if each else _MOST_TOKENS[device]


@torch.inference_mode()
def token_bytes(model: Any, device: str) -> float:
    """Bytes for each token of an answered row: of the cache that the model returns and, on a card, of computing it."""
    held, taken = {}, 0.0
    for length in (_SHORT, _LONG):
        if device == "cuda":
            torch.cuda.synchronize()
            torch.cuda.reset_peak_memory_stats()
            before = torch.cuda.memory_allocated()
        out = model(input_ids=torch.ones((1, length), dtype=torch.long, device=device), use_cache=True)
        held[length] = sum(each.numel() * each.element_size() for each in _tensors(getattr(out, "past_key_values", None)))
        if device == "cuda":
            taken = (torch.cuda.max_memory_allocated() - before) / length
    return max((held[_LONG] - held[_SHORT]) / (_LONG - _SHORT), taken)


def cache_token_bytes(settings: Settings) -> float | None:
    """Bytes of the KV cache for each token, by the model without weights, before one is loaded. None where it can't say."""
    from finetune.model.build import build_on_meta
    from finetune.model.quantisation import model_dtype
    from finetune.model.transformers_config import load_config

    try:
        model = build_on_meta(load_config(settings), None, dtype=model_dtype(settings), attention=None)
        return token_bytes(model.eval(), "meta")
    except (RuntimeError, ValueError, TypeError, NotImplementedError, AttributeError):  # it asks a tensor for its values
        return None


@dataclass(frozen=True)
class ChatMemory:
    """What a chat will take: the loaded model by the run's forecast, the KV cache of so many tokens, and what is free now."""

    model_bytes: int | None
    cache_bytes: int | None
    tokens: int
    free_bytes: int

    @property
    def fits(self) -> bool:
        """Whether what is known of it fits."""
        return (self.model_bytes or 0) + (self.cache_bytes or 0) <= self.free_bytes

    def in_words(self) -> str:
        """One line."""
        model = format_bytes(self.model_bytes) if self.model_bytes is not None else "not known"
        cache = format_bytes(self.cache_bytes) if self.cache_bytes is not None else "not known"
        fits = "" if self.fits else ": it may not fit"
        return f"model {model}, KV cache of {self.tokens:,} tokens {cache}; {format_bytes(self.free_bytes)} free{fits}"


def chat_memory(plan: Plan, max_new_tokens: int) -> ChatMemory:
    """Forecast for a chat whose conversation is as long as the training's longest row, and an answer."""
    tokens = plan.settings.max_length + max_new_tokens
    peaks = plan.forecast.peaks if plan.forecast else {}
    each = cache_token_bytes(plan.settings)
    free = psutil.virtual_memory().available if plan.card.is_cpu else _free_on_card(plan)
    return ChatMemory(peaks.get("load"), round(each * tokens) if each is not None else None, tokens, free)


def _free_on_card(plan: Plan) -> int:
    free = torch.cuda.mem_get_info()[0] if torch.cuda.is_available() else plan.card.free_bytes
    return free if plan.budget_bytes is None else min(free, plan.budget_bytes)


def halving(rows: list[int], work: Any) -> None:
    """Call `work(rows)`; where the card's memory runs out, with half of them at a time. One row alone raises what it raises."""
    try:
        work(rows)
    except torch.OutOfMemoryError:
        if len(rows) == 1:
            raise
        torch.cuda.empty_cache()
    else:
        return
    for part in (rows[: len(rows) // 2], rows[len(rows) // 2 :]):
        halving(part, work)


def _free_bytes(device: str, budget_bytes: int | None) -> int:
    if device == "cpu":
        return psutil.virtual_memory().available
    allocated = torch.cuda.memory_allocated()
    free = torch.cuda.mem_get_info()[0] + torch.cuda.memory_reserved() - allocated
    return free if budget_bytes is None else min(free, budget_bytes - allocated)


def _tensors(value: Any, depth: int = 4) -> Iterator[torch.Tensor]:
    """The tensors in a cache, whatever its class."""
    if isinstance(value, torch.Tensor):
        yield value
    elif depth and value is not None:
        inner = value if isinstance(value, (list, tuple)) else value.values() if isinstance(value, dict) else ()
        for each in inner or getattr(value, "__dict__", {}).values():
            yield from _tensors(each, depth - 1)
