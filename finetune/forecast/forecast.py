"""The forecast as a value: memory at the peak of load, training, evaluation and saving, part by part."""

from __future__ import annotations

from dataclasses import dataclass, field

#: The parts of the ledger, in the order in which they are shown.
PARTS = (
    "weights", "adapters", "gradients", "optimizer", "activations", "recomputed", "loss", "workspace", "gathered",
)  # fmt: skip


@dataclass(frozen=True)
class Forecast:
    """Forecast bytes of torch's allocator and of the whole card, with the bounds that the verdict uses.

    `parts` are the allocated bytes by part at the training peak; they sum to `allocated_bytes`. `peaks` has the allocated peak
    of each phase: load, train, eval, save. `peak_bytes` is the whole card's: allocated + allocator overhead + CUDA context.
    """

    allocated_bytes: int
    reserved_bytes: int
    peak_bytes: int
    peak_low_bytes: int
    peak_high_bytes: int
    parts: dict[str, int]
    peaks: dict[str, int]
    per_layer_bytes: dict[str, int] = field(default_factory=dict)
    step_s: float | None = None
    tokens_per_s: float | None = None
    host_bytes: int = 0
    disk_bytes: int = 0
    method: str = "dry run"  # `dry run, full depth (8 layers)` or `dry run, 4 of 32 layers, repeated`
    versions: dict[str, str] = field(default_factory=dict)
    notes: tuple[str, ...] = ()
