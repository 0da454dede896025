"""Simulation of all layers from a dry run of a few, and of mixed layers from simulations of all layers and of no layer."""

from __future__ import annotations

import contextlib
import dataclasses
import json
from collections import Counter
from collections.abc import Callable, Collection
from dataclasses import dataclass, field

import torch
from transformers import PretrainedConfig

from finetune.errors import RecipeError
from finetune.layers.checkpointing import decoder_layers
from finetune.memory.trace import NotRepeated, Recording, Trace
from finetune.memory.tracker import OFFLOADED, Peak, PhaseKey, Tag
from finetune.model.build import build_on_meta
from finetune.model.language_model import text_config
from finetune.settings import Settings
from finetune.settings.optimizers import OPTIMIZERS

#: Allocated once, in the first layer, for all layers: bitsandbytes' code book of 256 floats.
_ONE_OFF_BYTES = 1024
#: Layer kinds and parameter count by configuration: a search forecasts the same model many times.
_INSPECTED: dict[str, tuple[list[str], int]] = {}
#: Phase of a mixture-of-experts router's auxiliary loss, after the loss.
AUXILIARY = "auxiliary loss"
#: Phases in which it matters whether a layer is checkpointed.
_MIXED = ("forward", "loss", AUXILIARY, "loss backward", "backward")
#: Inputs that all checkpoints share.
_SHARED: Tag = ("activations", None)


@dataclass(frozen=True)
class Depth:
    """Map from the layers of a dry run to the layers of the full model."""

    #: Layers of the full model and of the dry run.
    full: int
    run: int
    #: The `period` layers from `start` on are repeated `times` more.
    start: int = 0
    period: int = 1
    times: int = 0

    @property
    def middle(self) -> range:
        return range(self.start, self.start + self.period)

    def full_index(self, layer: int) -> int:
        """Return the full model's index of a shallow layer."""
        return layer if layer < self.middle.stop else layer + self.times * self.period

    def shallow_index(self, layer: int) -> int:
        """Return the index of the shallow layer that represents a full model's layer."""
        if layer < self.start:
            return layer
        repeated = self.times * self.period
        return layer - repeated if layer >= self.start + repeated else self.start + (layer - self.start) % self.period


@dataclass(frozen=True)
class Simulation:
    """Peaks of a dry run by phase and layer."""

    peaks: dict[PhaseKey, Peak]
    #: Peak of host memory.
    host: Peak
    notes: tuple[str, ...] = ()
    #: Events of the layers that ran, before repetition to `depth`; None for two mixed simulations.
    recording: Recording | None = field(default=None, compare=False)
    depth: Depth | None = field(default=None, compare=False)

    def trace(self) -> Trace | None:
        """Return the events at full depth; None without a recording, or where the layers' events don't repeat."""
        try:
            return self.recording.trace(self.depth) if self.recording else None
        except NotRepeated:
            return None


def simulate_deep(
    config: PretrainedConfig,
    run: Callable[[PretrainedConfig], Simulation],
    # checkpointing repeats after this many layers
    every: int = 1,
    *,
    # the first layer saves other tensors than the rest; if False, tried second
    first_differs: bool = False,
    full_depth: bool = False,
) -> tuple[Simulation, str]:
    """Return the simulation at full depth, and its method.

    Run all layers if `full_depth`, or where the layers' bytes don't repeat.
    """
    kinds, _ = inspect_layers(config)
    for lead in [] if full_depth else sorted({int(first_differs), 1}):
        depth = plan_depth(kinds, every, lead)
        if not depth.times:
            break
        try:
            shallow = run(at_depth(config, depth.run))
        except Exception:  # noqa: BLE001 - the configuration's class may refuse another depth; all layers show its own errors
            break
        if _repeats(shallow.peaks, depth):
            peaks = _peaks_at_full_depth(shallow.peaks, depth)
            # optimizer states without a layer grow like the adapters
            growth = _adapter_bytes(peaks) / max(1, _adapter_bytes(shallow.peaks))
            peaks = {key: _with_more_states(peak, growth) for key, peak in peaks.items()}
            host = _with_more_layers(shallow.host, depth, depth.middle.stop, shallow.host, -depth.period)
            deep = dataclasses.replace(shallow, peaks=peaks, host=_with_more_states(host, growth), depth=depth)
            return deep, f"dry run, {depth.run} of {depth.full} layers, repeated"
    return run(config), f"dry run, full depth ({len(kinds)} layers)"


def plan_depth(kinds: list[str], every: int = 1, lead: int = 0) -> Depth:
    """Return the fewest layers that represent `kinds`: `lead` or more unrepeated layers, then three periods."""
    full = len(kinds)
    fewest = Depth(full, full)
    for period in range(every, full // 3 + 1, every):
        starts = range(lead, full - 3 * period + 1)
        first = next((start for start in starts if kinds[start:-period] == kinds[start + period :]), full)
        few = first + 3 * period + (full - first) % period
        if few < fewest.run:
            fewest = Depth(full, few, first + period, period, (full - few) // period)
    return fewest


def inspect_layers(config: PretrainedConfig) -> tuple[list[str], int]:
    """Return a description of each decoder layer, and the base model's number of parameters; tied ones count once.

    Layers of equal modules, shapes and settings have equal descriptions.
    """
    text = json.dumps(config.to_dict(), sort_keys=True, default=str)
    if text not in _INSPECTED:
        model = build_on_meta(config, None, dtype=torch.bfloat16, attention=None)
        kinds = [_kind(layer) for layer in decoder_layers(model)]
        if not kinds:
            raise RecipeError(
                f"the layers of a {config.model_type} model don't support gradient checkpointing, so they can't be told apart",
                "Give another model.",
            )
        _INSPECTED[text] = kinds, sum(parameter.numel() for parameter in model.parameters())
    return _INSPECTED[text]


def _kind(layer: torch.nn.Module) -> str:
    lines = []
    for name, module in layer.named_modules():
        settings = {
            key: value
            for key, value in vars(module).items()
            if not key.startswith("_") and key not in ("layer_idx", "training") and isinstance(value, (bool, int, float, str))
        }
        shapes = {key: tuple(value.shape) for key, value in module._parameters.items() if value is not None}
        lines.append(f"{name} {type(module).__name__} {sorted(settings.items())} {sorted(shapes.items())}")
    return "\n".join(lines)


def at_depth(config: PretrainedConfig, layers: int) -> PretrainedConfig:
    """Return the configuration with fewer layers. Its class may raise any exception."""
    values, text = config.to_dict(), text_config(config)
    section = next((values[name] for name in config.sub_configs if getattr(config, name, None) is text), values)
    full = text.num_hidden_layers
    for name, value in section.items():
        # lists and tables with an entry per layer
        if isinstance(value, (list, tuple)) and len(value) == full:
            section[name] = value[:layers]
        elif name == "per_layer_config" and value:
            section[name] = {layer: entry for layer, entry in value.items() if int(layer) < layers}
    name = type(text).attribute_map.get("num_hidden_layers", "num_hidden_layers")
    section[name] = layers
    return type(config).from_dict(values)


def fewest_layers(config: PretrainedConfig) -> PretrainedConfig:
    """Return the configuration of the fewest layers that represent the model, or of all if its class refuses another depth."""
    kinds, _ = inspect_layers(config)
    with contextlib.suppress(Exception):
        return at_depth(config, plan_depth(kinds, lead=1).run)
    return config


def _repeats(peaks: dict[PhaseKey, Peak], depth: Depth) -> bool:
    # at the loss, the activations of all layers are live
    peak = peaks[("loss", None)]
    tags = [(part, layer) for part, _ in peak for layer in depth.middle]
    return max(abs(peak[(part, layer)] - peak[(part, layer - depth.period)]) for part, layer in tags) <= _ONE_OFF_BYTES


def _peaks_at_full_depth(peaks: dict[PhaseKey, Peak], depth: Depth) -> dict[PhaseKey, Peak]:
    deepened: dict[PhaseKey, Peak] = {}
    for (phase, layer), peak in peaks.items():
        if layer is not None and layer in depth.middle:
            # in other phases, peaks of middle layers lie between the peaks of the first and the last layers
            if phase in ("forward", "backward"):
                # the running layer stands for the last repetition, so the other repetitions come before
                last, later = layer + depth.times * depth.period, peaks.get((phase, layer + depth.period), peak)
                deepened[(phase, last)] = _with_more_layers(peak, depth, depth.start, later, 0)
        else:
            shift = depth.period if layer is not None and layer < depth.start else -depth.period
            index = None if layer is None else depth.full_index(layer)
            deepened[(phase, index)] = _with_more_layers(peak, depth, depth.middle.stop, peak, shift)
    return deepened


def _adapter_bytes(peaks: dict[PhaseKey, Peak]) -> int:
    return sum(size for (part, _), size in peaks[("loss", None)].items() if part == "adapters")


def _with_more_states(peak: Peak, more: float) -> Peak:
    states = peak[("optimizer", None)]
    return Counter({**peak, ("optimizer", None): round(states * more)}) if states > _ONE_OFF_BYTES else peak


def _with_more_layers(peak: Peak, depth: Depth, at: int, neighbour: Peak, shift: int) -> Peak:
    """Insert the repeated layers before layer `at`."""
    more = depth.times * depth.period
    deep: Peak = Counter()
    for (part, layer), size in peak.items():
        deep[(part, layer if layer is None or layer < at else layer + more)] = size
        if layer is not None and at - depth.period <= layer < at:
            # drop bytes kept only while the next layers run: the layer `shift` further lacks them in `neighbour`
            lasting = min(size, neighbour[(part, layer + shift)])
            for time in range(1, depth.times + 1):
                deep[(part, layer + time * depth.period)] = lasting
    return deep


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
