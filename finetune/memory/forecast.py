"""The forecast as a value: memory at the peak of load, training, evaluation and saving, part by part."""

from __future__ import annotations

from dataclasses import dataclass, field, replace

from finetune.settings.vision import Sizes

#: The parts of the ledger, in the order in which they are shown.
PARTS = (
    "weights", "adapters", "gradients", "optimizer", "activations", "recomputed", "loss", "workspace", "gathered",
)  # fmt: skip
#: Largest error of the dry run on measured rows, as a share of allocated memory.
DRY_RUN_ERROR = 0.02
#: Share of allocated memory that torch reserves on top where the allocator is not replayed: (least, likely, most). With
#: expandable segments freed pages serve any request: up to 5 % and some pages (benchmarks/card_matrix.py). Without: 6-14 % on
#: 18 measured A100 rows with a fused loss.
EXPANDABLE, SEGMENTED = (0.0, 0.03, 0.05), (0.0, 0.08, 0.14)

#: How the note begins that says why a forecast of compiled layers is not possible.
UNCOMPILABLE = "what a compiled layer keeps can't be forecast"
#: How the note begins that counts the layers with less saved activations.
LEAN = "lean layers: "


@dataclass(frozen=True)
class PhaseForecast:
    """Forecast peaks of one phase; None where they are not known."""

    allocated_bytes: int | None = None
    reserved_bytes: int | None = None
    segments: int | None = None


@dataclass(frozen=True)
class Forecast:
    """Forecast bytes of torch's allocator and of the whole card, with the bounds that the verdict uses.

    `parts` are the allocated bytes by part at the training peak; they sum to `allocated_bytes`. `peaks` has the allocated peak
    of each phase: load, train, eval, save. `peak_bytes` is the whole card's: allocated + allocator overhead + CUDA context.
    `reserved_peaks` and `segments` are the peaks of reserved memory and of the number of segments by phase where torch's
    allocator is replayed; torch counts no expandable segments. `at_limit`: whether the run stays within a budget
    below its upper end, by a replay of the allocator with that limit. `pinned_bytes`: of `host_bytes` what offloading pins in a
    step.
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
    reserved_peaks: dict[str, int] = field(default_factory=dict)
    segments: dict[str, int] = field(default_factory=dict)
    at_limit: bool = False
    pinned_bytes: int = 0

    @property
    def layers(self) -> int:
        return sum(name.startswith("layers.") for name in self.per_layer_bytes)

    def of_phase(self, phase: str) -> PhaseForecast:
        """The peaks of a phase by its name in the events: load, train, evaluate or save."""
        name = "eval" if phase == "evaluate" else phase
        return PhaseForecast(self.peaks.get(name), self.reserved_peaks.get(name), self.segments.get(name))


@dataclass(frozen=True)
class RowShape:
    """Tokens of the longest row, and the largest share of a micro-batch's positions that count in the loss.

    `mismatched_tokens`: width of a KL batch, whose rows have a prompt and another row's answer; None: as `tokens`. `pictures`:
    width and height of each picture of the row with most pixels, after `max_pixels`; `eval_pictures` of the held-out row.
    `eval_tokens` and `eval_trained_share`: for the held-out rows; the training rows' figures where unknown.
    """

    tokens: int
    trained_share: float = 1.0
    eval_tokens: int | None = None
    eval_trained_share: float | None = None
    mismatched_tokens: int | None = None
    pictures: Sizes = ()
    eval_pictures: Sizes = ()


def why_not_compiled(forecast: Forecast) -> str:
    """Why the forecast is not of compiled layers though it should be; empty where it is."""
    return next((note for note in forecast.notes if note.startswith(UNCOMPILABLE)), "")


def with_margin_above(forecast: Forecast, other: Forecast) -> Forecast:
    """The forecast with at least the margin above allocated memory that `other` has, such as for rows of uneven length."""
    least = forecast.allocated_bytes + other.peak_high_bytes - other.allocated_bytes
    return replace(forecast, peak_high_bytes=max(forecast.peak_high_bytes, least))
