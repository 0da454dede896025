"""Memory of serving, computed on the meta device before anything is loaded."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import psutil
import torch

from finetune.errors import OutOfMemory
from finetune.evaluate.kv_cache import token_bytes
from finetune.layers.checkpointing import decoder_layers
from finetune.layers.layer_offloading import layout_bytes, offloaded_numbers, tensor_layout
from finetune.model.build import build_base, build_on_meta
from finetune.model.language_model import text_config
from finetune.model.quantisation import model_dtype
from finetune.settings.compatibility import BUFFERS
from finetune.units import format_bytes

#: GPU or host memory for activations and the CUDA context; weights and cache get the other bytes.
_MARGIN_BYTES = 2**29
#: A server with fewer tokens than this, or than the model's own limit, is useless.
_MIN_TOKENS = 256


@dataclass(frozen=True)
class ServingMemory:
    """Bytes of the weights, bytes of the KV cache per token, and the limit of tokens of a prompt with its answer."""

    weight_bytes: int
    token_bytes: float
    tokens: int

    @property
    def summary(self) -> str:
        cache = format_bytes(round(self.token_bytes * self.tokens))
        return f"{format_bytes(self.weight_bytes)} of weights and {cache} of KV cache for {self.tokens:,} tokens"


def serving_memory(
    settings: Any, config: Any, *, on_cpu: bool, adapter_bytes: int = 0, context: int | None = None
) -> ServingMemory:
    """The tokens that fit beside the weights: at most the model's own limit, or `context`.

    Raises OutOfMemory if the weights don't fit, or too few tokens do.
    """
    model = build_base(settings, config, device="meta", weights=False)
    weight_bytes = sum(tensor.nbytes for tensor in (*model.parameters(), *model.buffers())) + adapter_bytes
    if settings.layer_offloading is not False and not on_cpu:
        weight_bytes -= _offloaded_bytes(model, settings.offloaded_layers)
    # the cache is the same without quantised layers, which compute nothing on meta
    plain = build_on_meta(config, None, dtype=model_dtype(settings), attention=None, remote_code=settings.trust_remote_code)
    per_token = token_bytes(plain, "meta")
    free = psutil.virtual_memory().available if on_cpu else torch.cuda.mem_get_info()[0]
    limit = int(getattr(text_config(config), "max_position_embeddings", None) or 4096)
    wanted = min(limit, context or limit)
    fitting = int((free - weight_bytes - _MARGIN_BYTES) / per_token) if per_token else wanted
    memory = ServingMemory(weight_bytes, per_token, max(0, min(wanted, fitting)))
    if memory.tokens < min(wanted, context or _MIN_TOKENS):
        raise OutOfMemory(
            f"serving needs {format_bytes(weight_bytes)} of weights and {format_bytes(round(per_token))} of KV cache for each "
            f"token, but {format_bytes(free)} are free",
            "Close other programs, give a smaller --context, or use a smaller base model.",
        )
    return memory


def _offloaded_bytes(model: Any, count: int) -> int:
    """Bytes of the offloaded layers that are not on the GPU: all but those in the buffers."""
    layers = decoder_layers(model)
    layer_bytes = sorted(layout_bytes(tensor_layout(layers[index])) for index in offloaded_numbers(len(layers), count))
    return sum(layer_bytes[:-BUFFERS])
