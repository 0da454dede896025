"""Forecasts a deep model from a dry run of a few layers. That the layers repeat is checked; if not, all layers are run."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from transformers import PretrainedConfig

from finetune.errors import RecipeError
from finetune.layers.checkpointing import decoder_layers
from finetune.memory.tracker import Peak
from finetune.model.build import build_on_meta
from finetune.model.language_model import text_config

if TYPE_CHECKING:
    from finetune.memory.simulate import Simulation
    from finetune.memory.tracker import PhaseKey

#: Allocated once, in the first layer, for all: bitsandbytes' code book of 256 floats.
_ONE_OFF_BYTES = 1024

#: Layer kinds and parameters of the configurations of this process: a search forecasts the same model many times.
_INSPECTED: dict[str, tuple[tuple[str, ...], int]] = {}


@dataclass(frozen=True)
class Depth:
    """Maps a dry run of `run` layers to `full` ones: the `period` layers from `start` on are repeated `times` more."""

    full: int
    run: int
    start: int = 0
    period: int = 1
    times: int = 0

    @property
    def middle(self) -> range:
        return range(self.start, self.start + self.period)

    def full_index(self, layer: int) -> int:
        """Index in the full model of a layer of the shallow one."""
        return layer if layer < self.middle.stop else layer + self.times * self.period

    def shallow_index(self, layer: int) -> int:
        """Index in the shallow model of the layer that represents a layer of the full one."""
        if layer < self.start:
            return layer
        repeated = self.times * self.period
        return layer - repeated if layer >= self.start + repeated else self.start + (layer - self.start) % self.period


def simulate_deep(
    config: PretrainedConfig,
    run: Callable[[PretrainedConfig], Simulation],
    every: int = 1,
    *,
    first_differs: bool = False,
    full_depth: bool = False,
) -> tuple[Simulation, str]:
    """The simulation at the full depth of `config`, and the method that gave it.

    `every`: checkpointing repeats after this many layers. `first_differs`: the first layer is known to save other tensors than
    the rest; else this is tried second. `full_depth`: run all layers, which is also the fallback where layers don't
    repeat or don't keep equal bytes.
    """
    kinds = layer_kinds(config)
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
            growth = _adapter_bytes(peaks) / max(1, _adapter_bytes(shallow.peaks))
            host = _with_more_states(_with_more_layers(shallow.host, depth), growth)
            peaks = {key: _with_more_states(peak, growth) for key, peak in peaks.items()}
            lean = tuple(shallow.lean[depth.shallow_index(layer)] for layer in range(depth.full)) if shallow.lean else ()
            deep = dataclasses.replace(shallow, peaks=peaks, host=host, depth=depth, lean=lean)
            return deep, f"dry run, {depth.run} of {depth.full} layers, repeated"
    return run(config), f"dry run, full depth ({len(kinds)} layers)"


def plan_depth(kinds: list[str], every: int = 1, lead: int = 0) -> Depth:
    """Return the fewest layers that represent `kinds`: leading unrepeated layers (`lead` or more), then three periods."""
    full = len(kinds)
    fewest = Depth(full, full)
    for period in range(every, full // 3 + 1, every):
        first = next((start for start in range(lead, full) if _periodic(kinds, start, period)), full)
        few = first + 3 * period + (full - first) % period
        if few < fewest.run:
            fewest = Depth(full, few, first + period, period, (full - few) // period)
    return fewest


def _periodic(kinds: list[str], start: int, period: int) -> bool:
    return all(kinds[i] == kinds[i + period] for i in range(start, len(kinds) - period)) and start + 3 * period <= len(kinds)


def layer_kinds(config: PretrainedConfig) -> list[str]:
    """A description of each decoder layer; equal ones have the same modules, shapes and settings."""
    return list(_inspected(config)[0])


def has_identical_layers(config: PretrainedConfig) -> bool:
    """Whether all decoder layers have the same modules, shapes and settings."""
    return len(set(layer_kinds(config))) == 1


def count_parameters(config: PretrainedConfig) -> int:
    """Number of parameters of the base model; tied ones count once."""
    return _inspected(config)[1]


def _inspected(config: PretrainedConfig) -> tuple[tuple[str, ...], int]:
    text = json.dumps(config.to_dict(), sort_keys=True, default=str)
    if text not in _INSPECTED:
        model = build_on_meta(config, None, dtype=torch.bfloat16, attention=None, remote_code=hasattr(config, "auto_map"))
        kinds = tuple(_kind(layer) for layer in decoder_layers(model))
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
    """The configuration with fewer layers; lists and tables with an entry per layer are cut to match.

    Its class may refuse that with any exception.
    """
    values, text = config.to_dict(), text_config(config)
    section = next((values[name] for name in config.sub_configs if getattr(config, name, None) is text), values)
    full = text.num_hidden_layers
    for name, value in section.items():
        if isinstance(value, (list, tuple)) and len(value) == full:
            section[name] = value[:layers]
        elif name == "per_layer_config" and value:
            section[name] = {layer: entry for layer, entry in value.items() if int(layer) < layers}
    name = type(text).attribute_map.get("num_hidden_layers", "num_hidden_layers")
    section[name] = layers
    return type(config).from_dict(values)


def _repeats(peaks: dict[PhaseKey, Peak], depth: Depth) -> bool:
    """Whether repeated layers keep equal bytes live at the loss, when the activations of all layers are live."""
    by_tag = peaks[("loss", None)].by_tag
    tags = [(part, layer) for part, _ in by_tag for layer in depth.middle]
    differences = [abs(by_tag.get((part, layer), 0) - by_tag.get((part, layer - depth.period), 0)) for part, layer in tags]
    return max(differences) <= _ONE_OFF_BYTES


def _peaks_at_full_depth(peaks: dict[PhaseKey, Peak], depth: Depth) -> dict[PhaseKey, Peak]:
    """Insert the repeated layers after the middle layers. While a middle layer runs, insert them before it: it is the last.

    Outside forward and backward the middle layers' peaks are dropped: they lie between the first and the last layers' peaks.
    """
    deepened: dict[PhaseKey, Peak] = {}
    for (phase, layer), peak in peaks.items():
        if layer is not None and layer in depth.middle:
            if phase in ("forward", "backward"):
                index, later = layer + depth.times * depth.period, peaks.get((phase, layer + depth.period))
                deepened[(phase, index)] = _with_more_layers_before(peak, later or peak, depth)
        else:
            at_start = layer is not None and layer < depth.start
            deepened[(phase, None if layer is None else depth.full_index(layer))] = _with_more_layers(
                peak, depth, at_start=at_start
            )
    return deepened


def _adapter_bytes(peaks: dict[PhaseKey, Peak]) -> int:
    return sum(size for (part, _), size in peaks[("loss", None)].by_tag.items() if part == "adapters")


def _with_more_states(peak: Peak, more: float) -> Peak:
    by_tag = dict(peak.by_tag)
    if by_tag.get(("optimizer", None), 0) > _ONE_OFF_BYTES:
        by_tag[("optimizer", None)] = round(by_tag[("optimizer", None)] * more)
    return Peak(by_tag)


def _with_more_layers(peak: Peak, depth: Depth, *, at_start: bool = False) -> Peak:
    """Return the peak with the inserted layers, which save as much as the middle layers.

    Bytes that a middle layer keeps only while its neighbour runs are left out: the layer one period away lacks them.
    """
    by_tag = {(part, None if layer is None else depth.full_index(layer)): size for (part, layer), size in peak.by_tag.items()}
    other = depth.period if at_start else -depth.period
    for (part, layer), size in peak.by_tag.items():
        if layer is not None and layer in depth.middle:
            lasting = min(size, peak.by_tag.get((part, layer + other), 0))
            for time in range(1, depth.times + 1):
                by_tag[(part, layer + time * depth.period)] = lasting
    return Peak(by_tag)


def _with_more_layers_before(peak: Peak, later: Peak, depth: Depth) -> Peak:
    """Return the peak with layers inserted before the middle layers; they save as much as the layers of the first period.

    Bytes that these keep only while their neighbour runs are left out: the peak of one period `later` lacks them.
    """
    more = depth.times * depth.period
    by_tag = {
        (part, layer if layer is None or layer < depth.start else layer + more): size
        for (part, layer), size in peak.by_tag.items()
    }
    for (part, layer), size in peak.by_tag.items():
        if layer is not None and depth.start - depth.period <= layer < depth.start:
            lasting = min(size, later.by_tag.get((part, layer), 0))
            by_tag |= {(part, layer + time * depth.period): lasting for time in range(1, depth.times + 1)}
    return Peak(by_tag)
