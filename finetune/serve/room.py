"""What serving needs of the memory, counted on the meta device before anything is loaded."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import psutil
import torch

from finetune.errors import OutOfMemory
from finetune.evaluate.room import token_bytes
from finetune.model.build import build_base, build_on_meta
from finetune.model.checkpointing import decoder_layers
from finetune.model.language_model import text_config
from finetune.model.layer_offloading import BUFFERS, offloaded_numbers, run_bytes, spots_of
from finetune.model.quantisation import model_dtype
from finetune.units import format_bytes

#: The card's or the host's, for what is computed and for the CUDA context; the rest is for weights and cache.
_MARGIN_BYTES = 2**29
#: With less than this many tokens, or the model's own limit, a server is of no use.
_LEAST_TOKENS = 256


@dataclass(frozen=True)
class Room:
    """Bytes of the weights, bytes of the KV cache for each token, and how many tokens a prompt with its answer may have."""

    weight_bytes: int
    token_bytes: float
    tokens: int

    @property
    def in_words(self) -> str:
        """One line."""
        cache = format_bytes(round(self.token_bytes * self.tokens))
        return f"{format_bytes(self.weight_bytes)} of weights and {cache} of KV cache for {self.tokens:,} tokens"


def room(settings: Any, config: Any, *, on_cpu: bool, adapter_bytes: int = 0, context: int | None = None) -> Room:
    """How many tokens fit beside the weights: at most the model's own limit, or `context` of them.

    Raises OutOfMemory when the weights don't fit, or too few tokens.
    """
    model = build_base(settings, config, device="meta", weights=False)
    weights = sum(value.numel() * value.element_size() for value in (*model.parameters(), *model.buffers())) + adapter_bytes
    if settings.layer_offloading is not False and not on_cpu:
        weights -= _away_bytes(model, settings.offloaded_layers)
    # the cache is the same without quantised layers, which compute nothing on meta
    plain = build_on_meta(config, None, dtype=model_dtype(settings), attention=None, remote_code=settings.trust_remote_code)
    each = token_bytes(plain, "meta")
    free = psutil.virtual_memory().available if on_cpu else torch.cuda.mem_get_info()[0]
    limit = int(getattr(text_config(config), "max_position_embeddings", None) or 4096)
    wanted = min(limit, context or limit)
    fit = int((free - weights - _MARGIN_BYTES) / each) if each else wanted
    made = Room(weights, each, max(0, min(wanted, fit)))
    if made.tokens < min(wanted, context or _LEAST_TOKENS):
        raise OutOfMemory(
            f"serving needs {format_bytes(weights)} of weights and {format_bytes(round(each))} of KV cache for each token, "
            f"but {format_bytes(free)} are free",
            "Close other programs, give a smaller --context, or use a smaller base model.",
        )
    return made


def _away_bytes(model: Any, count: int) -> int:
    """Bytes of the offloaded layers that are not on the card: all but those in the buffers."""
    layers = decoder_layers(model)
    runs = sorted(run_bytes(spots_of(layers[number])) for number in offloaded_numbers(len(layers), count))
    return sum(runs[:-BUFFERS])
