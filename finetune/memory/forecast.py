"""Values of a forecast: peak memory of loading, training, evaluation and saving, by part."""

from __future__ import annotations

from dataclasses import dataclass, field

from finetune.settings.compatibility import Sizes

#: Parts of the ledger, in display order.
PARTS = ("weights", "adapters", "gradients", "optimizer", "activations", "recomputed", "loss", "workspace", "gathered")
#: Largest error of the dry run in the measured cases, as a share of allocated memory.
DRY_RUN_ERROR = 0.02
#: Share that torch reserves beyond allocated memory where the allocator is not replayed: (least, likely, most). With expandable
#: segments, freed pages serve any request: up to 5 % and some pages (benchmarks/card_matrix.py). Without: 6-14 % in 18 cases
#: measured on an A100 with a fused loss.
EXPANDABLE, SEGMENTED = (0.0, 0.03, 0.05), (0.0, 0.08, 0.14)

#: Start of the note that says why compiled layers can't be forecast.
UNCOMPILABLE = "activations saved by compiled layers can't be forecast"


@dataclass(frozen=True)
class PhaseForecast:
    """Forecast peaks of one phase; None where unknown."""

    allocated_bytes: int | None = None
    reserved_bytes: int | None = None
    segments: int | None = None


@dataclass(frozen=True)
class Forecast:
    """Forecast bytes of torch's allocator and of the whole GPU, with bounds.

    `parts`: allocated bytes at the training peak, summing to `allocated_bytes`. `peaks`: allocated peak of each phase: load,
    train, eval, save. `peak_bytes`: allocated memory, allocator overhead and CUDA context. `reserved_peaks` and `segments`:
    peaks by phase where torch's allocator is replayed; torch counts no expandable segments. `at_limit`: whether a budget below
    `peak_high_bytes` suffices in a replay with this limit. `pinned_bytes`: bytes of `host_bytes` that offloading pins.
    """

    allocated_bytes: int
    reserved_bytes: int
    peak_bytes: int
    peak_low_bytes: int
    peak_high_bytes: int
    parts: dict[str, int]
    peaks: dict[str, int]
    layers: int = 0
    step_s: float | None = None
    tokens_per_s: float | None = None
    host_bytes: int = 0
    disk_bytes: int = 0
    method: str = "dry run"  # `dry run, full depth (8 layers)` or `dry run, 4 of 32 layers, repeated`
    notes: tuple[str, ...] = ()
    reserved_peaks: dict[str, int] = field(default_factory=dict)
    segments: dict[str, int] = field(default_factory=dict)
    at_limit: bool = False
    pinned_bytes: int = 0

    def of_phase(self, phase: str) -> PhaseForecast:
        """Return the peaks of a phase by its name in the events: load, train, evaluate or save."""
        name = "eval" if phase == "evaluate" else phase
        return PhaseForecast(self.peaks.get(name), self.reserved_peaks.get(name), self.segments.get(name))


@dataclass(frozen=True)
class RowShape:
    """Shape of the longest row."""

    tokens: int
    #: Largest share of a micro-batch's positions that count in the loss.
    trained_share: float = 1.0
    #: Width of a KL batch, whose rows have a prompt and another row's answer; None: `tokens`.
    mismatched_tokens: int | None = None
    #: Width and height of each image of the row with most pixels, after `max_pixels`.
    pictures: Sizes = ()
    #: Shape of the longest held-out row; None: as in training.
    held_out: RowShape | None = None


@dataclass(frozen=True)
class Batch:
    """The largest micro-batch of a run."""

    rows: int
    #: Width of each row.
    tokens: int
    #: Tokens that count in the loss, over all rows.
    trained_tokens: int
    #: Rows differ in length, so a model that needs a mask reads one.
    padded: bool = False
    #: Examples packed into each row.
    documents: int = 1
    #: As in RowShape.
    mismatched_tokens: int | None = None
    pictures: Sizes = ()
    #: The largest micro-batch of an evaluation.
    held_out: Batch | None = None


def why_not_compiled(forecast: Forecast) -> str:
    """Return why the forecast is not for compiled layers; empty if it is, or need not be."""
    return next((note for note in forecast.notes if note.startswith(UNCOMPILABLE)), "")
