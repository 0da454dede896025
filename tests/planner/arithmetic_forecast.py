"""A forecast by arithmetic: monotone in everything and quick, so that the planner can be tried on thousands of cases."""

from typing import Any

from finetune.card import Card
from finetune.memory.forecast import Forecast, RowShape
from finetune.planner.shape import ModelShape, shape_of
from finetune.settings import Recipe
from finetune.settings.optimizers import OPTIMIZERS
from finetune.units import GIB, MIB

LLAMA_8B = ModelShape(
    family="llama", parameters=8_030_261_248, linear=6_979_321_856, expert=0, head=525_336_576, linear_width=2_621_440,
    adapter_per_rank=2_621_440, adapters=224, layers=32, hidden=4096, attention_width=4096, heads=32,
)  # fmt: skip
SAVED_BYTES = 47.6  # eager layers with 16-bit adapters, per hidden element, layer and token


class ArithmeticForecaster:
    """Weights, adapters and saved activations by hand; context and a tenth of slack on top."""

    def __init__(self) -> None:
        self.calls = 0

    def __call__(self, config: dict[str, Any], settings: Recipe, card: Card, *, rows: RowShape, **_: Any) -> Forecast:
        self.calls += 1
        shape = shape_of(config, settings)
        adapters = settings.lora_r * shape.adapter_per_rank
        n_tokens = settings.per_device_train_batch_size * rows.tokens
        layer, entry = SAVED_BYTES * shape.hidden * n_tokens, 2 * shape.hidden * n_tokens
        recomputed = 0
        if settings.activation_checkpointing is not False:
            recomputed = -(-shape.layers // settings.activation_checkpointing_every_n_layers)
        saved = {"offload": 0, "selective": entry + 2 * shape.attention_width * n_tokens}.get(
            settings.activation_checkpointing, entry
        )
        parts = {
            "weights": shape.weight_bytes(settings.base_format), "adapters": 4 * adapters, "gradients": 4 * adapters,
            "optimizer": round(OPTIMIZERS[settings.optim].state_bytes * adapters),
            "activations": round((shape.layers - recomputed) * layer + recomputed * saved),
            "recomputed": round(layer if recomputed else 0),
            "loss": 256 * MIB + 4 * shape.hidden * n_tokens, "workspace": 64 * MIB,
        }  # fmt: skip
        allocated = sum(parts.values())
        reserved = round(1.04 * allocated)
        context = card.context_bytes or 0
        peaks = {"load": parts["weights"], "train": allocated, "eval": parts["weights"], "save": parts["weights"]}
        return Forecast(
            allocated_bytes=allocated, reserved_bytes=reserved, peak_bytes=reserved + context,
            peak_low_bytes=allocated + context - card.context_uncertainty_bytes,
            peak_high_bytes=round(1.1 * allocated) + context + card.context_uncertainty_bytes, parts=parts, peaks=peaks,
            layers=shape.layers, host_bytes=2 * GIB, disk_bytes=GIB, method="arithmetic",
        )  # fmt: skip
