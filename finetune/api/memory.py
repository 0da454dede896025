"""`lean`: a memory technique for a loaded model; `track`: memory of the tensors in any code, real or fake."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager

import torch

from finetune.errors import RecipeError
from finetune.memory.tracker import StorageTracker
from finetune.units import format_bytes


def lean(model: torch.nn.Module, *, enabled: bool = True) -> list[str]:
    """Roughly halve the activations stored for the backward pass; gradients change only by rounding.

    Changes the model in place; `enabled=False` reverts that. Returns a summary of each decoder layer. Raises RecipeError
    for a model without decoder layers.
    """
    from finetune.layers.checkpointing import decoder_layers, outside_layers
    from finetune.layers.lean_layers import lean_summary, make_lean, undo_lean

    layers = decoder_layers(model)
    if not layers:
        raise RecipeError(
            "the model has no decoder layers that transformers can checkpoint", "Give a transformers language model."
        )
    (make_lean if enabled else undo_lean)([*layers, *outside_layers(model)])
    return [lean_summary(layer) for layer in layers] if enabled else []


class MemoryTracker(StorageTracker):
    """Live and peak bytes of tensors, rounded up to the blocks of torch's allocator."""

    @property
    def peak_bytes(self) -> int:
        return max((peak.total() for peak in self.peaks.values()), default=0)

    @property
    def peaks_by_phase(self) -> dict[str, int]:
        """Return peak bytes by phase; `memory.phase = "backward"` starts a phase."""
        highest: Counter[str] = Counter()
        for (phase, _), peak in self.peaks.items():
            highest[phase] = max(highest[phase], peak.total())
        return dict(highest)

    def __str__(self) -> str:
        return "\n".join(f"{phase or 'all'}: {format_bytes(size)}" for phase, size in self.peaks_by_phase.items())


@contextmanager
def track(model: torch.nn.Module | None = None, *, phase: str = "all") -> Iterator[MemoryTracker]:
    """Track tensors: `with finetune.track(model) as memory: ...; memory.peak_bytes`.

    `model`: also count its tensors. Excludes the CUDA context and cuBLAS workspaces.
    """
    tracker = MemoryTracker()
    tracker.phase, tracker.part = phase, "activations"
    if model is not None:
        gradients = (parameter.grad for parameter in model.parameters() if parameter.grad is not None)
        for tensor in (*model.parameters(), *model.buffers(), *gradients):
            with tracker.tagging("weights"):
                tracker.track(tensor)
    tracker.record()  # a peak even if the block allocates nothing
    with tracker:
        yield tracker
