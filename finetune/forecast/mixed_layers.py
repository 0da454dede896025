"""Every n-th layer checkpointed, or some layers offloaded, from two simulations: all layers and none.

Exact for identical layers.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import TYPE_CHECKING

from finetune.forecast.simulate import AUXILIARY, Simulation
from finetune.forecast.tracker import OFFLOADED, Peak
from finetune.recipe.compatibility import is_zero3

if TYPE_CHECKING:
    from finetune.forecast.tracker import Place, Tag
    from finetune.recipe import Settings

#: Phases in which it matters whether a layer is checkpointed.
_MIXED = ("forward", "loss", AUXILIARY, "loss backward", "backward")


def can_mix(settings: Settings, identical: bool) -> bool:
    """Whether `mix_layers` is exact for these settings; `identical`: all decoder layers have the same modules and shapes.

    Layers that differ share tables and masks, which live as long as one layer keeps them. Activations on their way to the host
    belong to no layer, reentrant checkpointing (ZeRO-3) frees at other moments, and Adafactor is run at full depth anyway.
    """
    return (
        identical
        and settings.activation_checkpointing is True
        and settings.activation_offloading is False
        and settings.optim != "adafactor"
        and not is_zero3(settings.launch)
    )


def mix_layers(recomputed: Simulation, kept: Simulation, every: int) -> Simulation:
    """Layers whose number is a multiple of `every` from `recomputed`, all others from `kept`.

    Both simulations run the same layers in the same order, and layers pass each other the same tensors. So each layer keeps
    what it keeps in its own simulation. Tensors of no layer come from the simulation of the running layer, except inputs that
    all checkpoints share, such as masks.
    """
    last = max(layer for _, layer in recomputed.peaks if layer is not None)
    last_recomputed = last // every * every
    peaks = dict(recomputed.peaks)
    for phase in _MIXED:
        layers = {layer for of, layer in recomputed.peaks if of == phase}
        for layer in layers | ({last_recomputed} if last in layers else set()):
            one, other = _at((phase, layer), recomputed, last), _at((phase, layer), kept, last)
            own = one if layer is None or layer % every == 0 else other
            by_tag = _of_no_layer(own, one) | _of_layers(one, every, True) | _of_layers(other, every, False)
            peaks[(phase, layer)] = Peak(sum(by_tag.values()), by_tag, own.operator)
    return Simulation(peaks, recomputed.host, recomputed.notes, recomputed.lean)


def mix_resident(offloaded: Simulation, resident: Simulation, away: Collection[int]) -> Simulation:
    """Layers whose number is in `away` have their weights in host memory, as in `offloaded`, all others as in `resident`.

    Weights are all that the two differ in, and the buffers, which belong to no layer.
    """
    peaks = {}
    for place, peak in offloaded.peaks.items():
        here = resident.peaks.get(place, Peak()).by_tag
        weights = {tag: size for tag, size in here.items() if tag[0] == "weights" and tag[1] is not None and tag[1] not in away}
        by_tag = peak.by_tag | weights
        peaks[place] = Peak(sum(by_tag.values()), by_tag, peak.operator)
    on_host = {tag: size for tag, size in offloaded.host.by_tag.items() if tag[0] != OFFLOADED or tag[1] in away}
    host = Peak(sum(on_host.values()), on_host, offloaded.host.operator)
    return Simulation(peaks, host, offloaded.notes, offloaded.lean)


def _at(place: Place, simulation: Simulation, last: int) -> Peak:
    """The peak at a place; for a layer that was repeated instead of run, that of the last layer but one, shifted."""
    phase, layer = place
    if place in simulation.peaks or layer is None:
        return simulation.peaks.get(place, Peak())
    peak, back = simulation.peaks[(phase, last - 1)], last - 1 - layer
    by_tag: dict[Tag, int] = {}
    for (part, holder), size in peak.by_tag.items():
        if holder is None or holder < layer:
            by_tag[(part, holder)] = size
        elif holder >= last - 1:
            by_tag[(part, holder - back)] = size
            if holder == last:
                by_tag |= {(part, passed): size for passed in range(last - back, last + 1)}
    return Peak(sum(by_tag.values()), by_tag, peak.operator)


def _of_no_layer(own: Peak, recomputed: Peak) -> dict[Tag, int]:
    held = {tag: size for tag, size in own.by_tag.items() if tag[1] is None}
    shared = ("activations", None)
    return held | {shared: max(held.get(shared, 0), recomputed.by_tag.get(shared, 0))}


def _of_layers(peak: Peak, every: int, multiples: bool) -> dict[Tag, int]:
    return {tag: size for tag, size in peak.by_tag.items() if tag[1] is not None and (tag[1] % every == 0) == multiples}
