"""Every n-th layer checkpointed, or some layers offloaded, from simulations of all layers and of no layer."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection

from finetune.memory.step import AUXILIARY, Simulation
from finetune.memory.tracker import OFFLOADED, Peak, PhaseKey, Tag
from finetune.settings import Settings
from finetune.settings.optimizers import OPTIMIZERS

#: Phases in which it matters whether a layer is checkpointed.
_MIXED = ("forward", "loss", AUXILIARY, "loss backward", "backward")
#: Inputs that all checkpoints share.
_SHARED: Tag = ("activations", None)


def can_mix(settings: Settings, identical: bool) -> bool:
    """Tell whether `mix_layers` is exact for these settings."""
    # Layers that differ share tables and masks, which live as long as one layer saves them. Reentrant checkpointing (ZeRO-3)
    # frees at other moments, and small states run at full depth anyway.
    return (
        identical
        and settings.activation_checkpointing is True
        and not OPTIMIZERS[settings.optim].small_states
        and not settings.launch.is_zero3
    )


def mix_layers(recomputed: Simulation, plain: Simulation, every: int) -> Simulation:
    """Take layers whose number is a multiple of `every` from `recomputed`, the rest from `plain`."""
    last = max(layer for _, layer in recomputed.peaks if layer is not None)
    last_recomputed = last // every * every
    peaks = dict(recomputed.peaks)
    for phase in _MIXED:
        layers = {layer for name, layer in recomputed.peaks if name == phase}
        for layer in layers | ({last_recomputed} if last in layers else set()):
            ckpt_peak, plain_peak = _at((phase, layer), recomputed, last), _at((phase, layer), plain, last)
            own = ckpt_peak if layer is None or layer % every == 0 else plain_peak
            # Both simulations run the same layers in the same order, and layers pass each other the same tensors, so each layer
            # saves as much as in its simulation. Tensors without a layer come from the running layer's simulation, except
            # inputs that all checkpoints share, such as masks.
            shared = {tag: size for tag, size in own.items() if tag[1] is None}
            shared[_SHARED] = max(own[_SHARED], ckpt_peak[_SHARED])
            layer_sizes = _layer_sizes(ckpt_peak, every, multiples=True) | _layer_sizes(plain_peak, every, multiples=False)
            peaks[(phase, layer)] = Counter(shared | layer_sizes)
    return Simulation(peaks, recomputed.host, recomputed.notes)


def mix_resident(offloaded: Simulation, resident: Simulation, numbers: Collection[int]) -> Simulation:
    """Take layers in `numbers` from `offloaded`, the rest from `resident`."""
    peaks = {}
    for key, peak in offloaded.peaks.items():
        peaks[key] = peak.copy()
        # only weights and the buffers, which belong to no layer, differ
        for (part, layer), size in resident.peaks.get(key, {}).items():
            if part == "weights" and layer is not None and layer not in numbers:
                peaks[key][(part, layer)] = size
    host = Counter({tag: size for tag, size in offloaded.host.items() if tag[0] != OFFLOADED or tag[1] in numbers})
    return Simulation(peaks, host, offloaded.notes)


def _at(key: PhaseKey, simulation: Simulation, last: int) -> Peak:
    phase, layer = key
    if key in simulation.peaks or layer is None:
        return simulation.peaks.get(key, Counter())
    shifted: Peak = Counter()
    for (part, owner), size in simulation.peaks[(phase, last - 1)].items():
        if owner is None or owner < layer:
            shifted[(part, owner)] = size
        elif owner == last - 1:
            shifted[(part, layer)] = size
        elif owner == last:
            for index in range(layer + 1, last + 1):
                shifted[(part, index)] = size
    return shifted


def _layer_sizes(peak: Peak, every: int, multiples: bool) -> dict[Tag, int]:
    return {tag: size for tag, size in peak.items() if tag[1] is not None and (tag[1] % every == 0) == multiples}
