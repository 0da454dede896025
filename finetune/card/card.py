"""Card: the facts of one GPU, as a value."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Card:
    """Facts of one card. Units: bytes and FLOP per second. A missing fact stays None.

    `total_bytes`: as torch sees it, less than the number on the box. `free_bytes`: free now (catalogue: total less the usual
    use by a desktop). `capability`: CUDA's compute capability; None for a CPU. `bf16_flops`, `fp32_flops` (cards without bf16)
    and `bandwidth_bytes_s` are published rates; training steps reach `flops_share` (in large matrix products: 140 of 165
    TFLOP/s on a 4090) and `bandwidth_share`. If `rates_measured_at` is set, they, `attention_flops` and `launch_s`
    are measured on this machine. `context_bytes`: the CUDA context, not counted by torch's allocator. `uuid`: of a
    card of this machine, for CUDA_VISIBLE_DEVICES. `problem`: why the installed torch can't use it, and `problem_fix`.
    """

    name: str
    total_bytes: int
    free_bytes: int
    capability: tuple[int, int] | None = None
    bf16_flops: float | None = None
    fp32_flops: float | None = None
    bandwidth_bytes_s: float | None = None
    flops_share: float = 0.85
    bandwidth_share: float = 1.0
    attention_flops: float | None = None
    launch_s: float | None = None
    rates_measured_at: str = ""
    pcie_bytes_s: float | None = None
    context_bytes: int | None = None
    context_uncertainty_bytes: int = 0
    source: str = "catalogue"  # catalogue | measured | cpu
    reason: str = ""
    uuid: str | None = None
    problem: str = ""
    problem_fix: str = ""

    @property
    def is_cpu(self) -> bool:
        return self.source == "cpu"

    @property
    def supports_bf16(self) -> bool:
        """Whether it trains in bf16, else in fp16. Every CPU can."""
        return self.is_cpu or (self.capability is not None and self.capability >= (8, 0))  # Turing trains in fp16
