"""The cells of the benchmark, the most informative first, and how each should end."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

FINISHED, OUT_OF_MEMORY = "finished", "out of memory"


@dataclass(frozen=True)
class Cell:
    """One run. `cap` is a memory budget: a field of the cell's own forecast, and a factor."""

    name: str
    what: str
    settings: dict[str, Any] = field(default_factory=dict)
    full_depth: bool = False
    documents: int = 1
    cap: tuple[str, float] | None = None
    ends: str = FINISHED
    environment: dict[str, str] = field(default_factory=dict)
    card_only: bool = False


#: Settings of every run, all that the planner would choose by memory or speed; 2 micro-batches a step, rows of unequal length.
COMMON = {
    "dtype": "bfloat16", "lora_r": 16, "optim": "adamw_torch_fused", "per_device_train_batch_size": 2,
    "per_device_eval_batch_size": 2, "effective_batch_size": 4, "packing": False, "attn_implementation": "sdpa",
    "activation_checkpointing_every_n_layers": 1, "sample_answers": 0, "load_in_8bit": False,
}  # fmt: skip


def _settings(nf4: bool, checkpointing: bool | str, **more: Any) -> dict[str, Any]:
    return {**COMMON, "load_in_4bit": nf4, "activation_checkpointing": checkpointing, **more}


_KEPT, _RECOMPUTED, _16_BIT = _settings(True, False), _settings(True, True), _settings(False, False)
_PACKED = {"packing": True, "attn_implementation": "torch_varlen", "per_device_train_batch_size": 1, "effective_batch_size": 2}

CELLS = (
    Cell("nf4-recompute", "NF4, every layer recomputed", _RECOMPUTED),
    Cell("nf4-keep", "NF4, nothing recomputed", _KEPT),
    Cell("16bit-keep", "16 bit, nothing recomputed", _16_BIT),
    Cell("full-depth", "full depth, NF4, every layer recomputed", _RECOMPUTED, full_depth=True),
    Cell("fits", "budget: the forecast's upper end", _KEPT, cap=("peak_high_bytes", 1.0), card_only=True),
    Cell(
        "short", "budget: 0.95 of the forecast's lower end", _KEPT, cap=("peak_low_bytes", 0.95), ends=OUT_OF_MEMORY,
        card_only=True,
    ),
    Cell("nf4-offload", "NF4, layer inputs offloaded", _settings(True, "offload")),
    Cell("nf4-selective", "NF4, attention outputs kept", _settings(True, "selective")),
    Cell("packed", "NF4, every layer recomputed, 8 rows packed", _settings(True, True, **_PACKED), documents=8),
    Cell("adamw-on-cpu", "NF4, recomputed, AdamW in host memory", _settings(True, True, optim="adamw_cpu_offload")),
    Cell(
        "shorter", "budget: 0.9 of the forecast's lower end", _KEPT, cap=("peak_low_bytes", 0.9), ends=OUT_OF_MEMORY,
        card_only=True,
    ),
    Cell(
        "cudnn", "NF4, nothing recomputed, torch's own choice of attention", _KEPT, card_only=True,
        environment={"TORCH_CUDNN_SDPA_DEPRIORITIZED": "0"},
    ),
)  # fmt: skip
