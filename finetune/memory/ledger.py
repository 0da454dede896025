"""Allocated bytes of a step by part, from the cache or a dry run. Importing this needs no torch."""

from __future__ import annotations

import math
from collections import Counter, OrderedDict
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field, replace
from functools import cached_property
from operator import attrgetter
from typing import TYPE_CHECKING, Any

from finetune.memory import cache
from finetune.memory.allocator_replay import MicroBatchEvents, Replay, micro_batch_widths, replay, replay_widths
from finetune.memory.caching_allocator import OutOfMemory
from finetune.memory.forecast import LEAN, PARTS, Batch
from finetune.memory.trace import NotRepeated
from finetune.settings import resolved
from finetune.settings.compatibility import is_zero3, padding_multiple
from finetune.settings.methods import METHODS, has_kl
from finetune.settings.optimizers import OPTIMIZERS
from finetune.settings.schema import Decides, settings_that_decide

if TYPE_CHECKING:
    from transformers import PretrainedConfig

    from finetune.memory.forecast import RowShape
    from finetune.memory.step import Simulation
    from finetune.memory.tracker import Peak
    from finetune.settings import Settings

#: Cache key entries of settings that decide bytes, where not their value. None: the batch's shape, the card's capability or the
#: configuration covers the setting.
_REDUCED: dict[str, Callable[[Settings], Any] | None] = {
    # micro-batches with images wait on the GPU, so their number counts
    "gradient_accumulation_steps": lambda settings: (
        settings.gradient_accumulation_steps if settings.vision else settings.gradient_accumulation_steps != 1
    ),
    # layers in a file pass through the same buffers as layers in host memory
    "layer_offloading": lambda settings: settings.layer_offloading is not False,
    "offloaded_layers": lambda settings: settings.offloaded_layers if settings.layer_offloading else 0,
    "lora_dropout": lambda settings: settings.lora_dropout > 0,
    "launch": lambda settings: is_zero3(settings.launch),  # it needs reentrant checkpointing; nothing else matters here
    "loss_type": lambda settings: has_kl(settings.method, settings.loss_type),
    "dataset": None, "max_length": None, "per_device_train_batch_size": None, "per_device_eval_batch_size": None,
    "eval_steps": None, "gpu": None, "model_name_or_path": None,
}  # fmt: skip
#: Phases of the dry run that make up a training step.
_TRAIN = ("forward", "loss", "auxiliary loss", "loss backward", "backward", "optimizer")
#: Compute capability of a dry run when no card is given: Ampere.
USUAL_CAPABILITY = (8, 0)
#: Last simulations of this process, newest last: `mix_layers` reuses them for plans with every n-th layer checkpointed.
_SIMULATED: OrderedDict[str, tuple[Simulation, str]] = OrderedDict()
_MOST_SIMULATED = 8


@dataclass(frozen=True)
class DryRun:
    """Allocated bytes of one plan."""

    #: Bytes by part, at the training peak.
    parts: dict[str, int]
    #: Peak of each phase.
    peaks: dict[str, int]
    #: At the training peak: `layers.0`, ..., and `outside the layers`.
    per_layer_bytes: dict[str, int]
    #: Pinned or managed host memory of activations, optimizer states and offloaded layers.
    host_bytes: int
    #: Number of parameters of the base model.
    parameters: int
    method: str
    versions: dict[str, str] = field(default_factory=dict)
    notes: tuple[str, ...] = ()
    #: Bytes of offloaded layers, in host memory or in a file.
    offloaded_bytes: int = 0
    #: Bytes of the largest offloaded layer.
    largest_offloaded_bytes: int = 0

    @property
    def allocated_bytes(self) -> int:
        return sum(self.parts.values())


@dataclass(frozen=True)
class LargestStep:
    """A run's step with micro-batches of the longest `rows`; the dry run and replays are cached on disk.

    Raises RecipeError for a model that can't be built.
    """

    config: dict[str, Any]
    settings: Settings
    rows: RowShape
    #: Of the GPU; None: the run is on the CPU.
    capability: tuple[int, int] | None = USUAL_CAPABILITY

    def dry_run(self) -> DryRun:
        """Return the allocated bytes."""

        def simulated_parts() -> DryRun:
            from finetune.compat.imports import import_libraries

            import_libraries()
            from finetune.memory.depth import inspect_layers

            simulation, method = self.simulated()
            _, parameters = inspect_layers(self._model_config)
            return ledger_of(simulation, self.capability, parameters=parameters, method=method)

        return cache.cached(self._key("dry run"), DryRun, simulated_parts)

    def replayed(self, *, expandable: bool, limit: int | None = None) -> Replay | None:
        """Replay the events on torch's allocator; None where they can't be, or when `limit` (reserved bytes) is too low."""
        # copies run beside the computation, so the order of events is unknown
        if self.settings.activation_offloading or self.settings.activation_checkpointing == "offload":
            return None

        def replayed_peaks() -> Replay | None:
            from finetune.memory.step import garbage_collection_paused

            with garbage_collection_paused(), suppress(OutOfMemory):
                trace = self.simulated()[0].trace()
                return replay(trace, expandable=expandable, limit=limit) if trace else None
            return None  # out of memory within the limit

        return cache.cached(self._key("replay", expandable=expandable, limit=limit), Replay | None, replayed_peaks)

    def reserved_over(self, lengths: Sequence[int], *, expandable: bool) -> int | None:
        """Return the peak reserved bytes over steps of rows of these lengths, or None."""
        micro, accumulation = self.settings.per_device_train_batch_size, self.settings.gradient_accumulation_steps
        widths = micro_batch_widths(lengths, micro, self.rows.tokens, accumulation)

        def reserved_by_steps() -> int | None:
            from finetune.memory.step import garbage_collection_paused

            # traces at two widths show how each size grows with the width
            tokens, narrow = self.rows.tokens, self.rows.tokens // 2
            steps = self, replace(self, rows=replace(self.rows, tokens=narrow))
            with garbage_collection_paused(), suppress(NotRepeated):
                wide, other = (step.simulated()[0].trace() for step in steps)
                if wide and other:
                    micro_batches = MicroBatchEvents(wide, tokens, other, narrow)
                    return replay_widths(wide, micro_batches, widths, accumulation, expandable=expandable)
            return None

        key = self._key("growth", expandable=expandable, widths=widths, accumulation=accumulation)
        return cache.cached(key, int | None, reserved_by_steps)

    def _key(self, kind: str, **more: Any) -> str:
        reduced = {name: _REDUCED.get(name, attrgetter(name)) for name in settings_that_decide(Decides.BYTES)}
        settings = {name: reduce(self.settings) for name, reduce in reduced.items() if reduce is not None}
        return cache.key_of(
            kind=kind, config=self.config, settings=settings, batch=asdict(batch_of(self.settings, self.rows)),
            capability=self.capability, **more,
        )  # fmt: skip

    @cached_property
    def _model_config(self) -> PretrainedConfig:
        from finetune.model.transformers_config import config_from

        return config_from(self.config, self.settings)

    def _with(self, **changes: Any) -> LargestStep:
        return replace(self, settings=resolved(self.settings, **changes))

    def simulated(self) -> tuple[Simulation, str]:
        """Return the simulation, and its method."""
        from finetune.memory.depth import inspect_layers, simulate_deep
        from finetune.memory.mixed_layers import can_mix, mix_layers, mix_resident
        from finetune.memory.simulate import simulate

        # Mixing two simulations is faster than a dry run of every n-th layer checkpointed, but yields peaks without events,
        # which can't be replayed.
        config, settings, every = self._model_config, self.settings, self.settings.activation_checkpointing_every_n_layers
        kinds, _ = inspect_layers(config)
        is_uniform = len(set(kinds)) == 1
        if every > 1 and can_mix(settings, is_uniform):
            (recomputed, method), (uncheckpointed, _) = (
                self._with(activation_checkpointing=all_layers, activation_checkpointing_every_n_layers=1).simulated()
                for all_layers in (True, False)
            )
            return mix_layers(recomputed, uncheckpointed, every), method
        layers, is_partial = len(kinds), settings.layer_offloading is not False and settings.offloaded_layers < len(kinds)
        if is_partial and is_uniform:
            from finetune.layers.layer_offloading import offloaded_numbers

            offloaded, method = self._with(offloaded_layers=layers).simulated()
            resident, _ = self._with(layer_offloading=False, offloaded_layers=0).simulated()
            return mix_resident(offloaded, resident, offloaded_numbers(layers, settings.offloaded_layers)), method
        key = self._key("simulation")
        if key not in _SIMULATED:
            batch = batch_of(settings, self.rows)
            _SIMULATED[key] = simulate_deep(
                config,
                lambda shallow: simulate(shallow, settings, batch, self.capability),
                every,
                first_differs=first_layer_saves_less(settings),
                full_depth=OPTIMIZERS[settings.optim].small_states or is_partial,  # which layers are offloaded doesn't repeat
            )
            while len(_SIMULATED) > _MOST_SIMULATED:
                _SIMULATED.popitem(last=False)
        return _SIMULATED[key]


def batch_of(settings: Settings, rows: RowShape) -> Batch:
    """Return the largest micro-batches of training and evaluation."""
    is_packed, train_micro = settings.packing is True, settings.per_device_train_batch_size
    sequences = METHODS[settings.method].sequences
    padded, documents = sequences * train_micro > 1 and not is_packed, max(1, rows.tokens // 256) if is_packed else 1
    mismatched_tokens = rows.mismatched_tokens if has_kl(settings.method, settings.loss_type) else None

    def batch(shape: RowShape, micro: int) -> Batch:
        count, multiple = sequences * micro, padding_multiple(settings, micro)
        tokens, trained = -(-shape.tokens // multiple) * multiple, round(shape.trained_share * count * (shape.tokens - 1))
        pictures = shape.pictures if settings.vision is True else ()
        return Batch(count, tokens, trained, padded, documents, mismatched_tokens, pictures)

    training = batch(rows, train_micro)
    if settings.eval_steps == 0:
        return training
    return replace(training, held_out=batch(rows.held_out or rows, settings.per_device_eval_batch_size))


def ledger_of(simulation: Simulation, capability: tuple[int, int] | None, *, parameters: int, method: str) -> DryRun:
    """Return the parts and peaks of a simulated step."""
    from finetune.memory.rules import cublas_workspace_bytes
    from finetune.memory.tracker import OFFLOADED

    # cuBLAS handles of the main thread and of the autograd thread
    workspace = 2 * cublas_workspace_bytes(capability)
    top = _highest(simulation, _TRAIN)
    parts = Counter({part: 0 for part in PARTS})
    layers: Counter[int | None] = Counter()
    for (part, layer), size in top.items():
        parts[part] += size
        layers[layer] += size
    parts["workspace"] += workspace
    layers[None] += workspace
    peaks = {"load": _highest(simulation, ("load", "adapters", "casts")).total(), "train": top.total() + workspace}
    for phase in ("eval", "save"):
        sizes = [peak.total() for (name, _), peak in simulation.peaks.items() if name == phase]
        peaks[phase] = max(sizes) + workspace if sizes else 0
    kinds = Counter(simulation.lean)
    lean = LEAN + "; ".join(f"{count} of {kinds.total()} with {summary}" for summary, count in kinds.items())
    offloaded = [size for (part, _), size in simulation.host.items() if part == OFFLOADED]
    return DryRun(
        parts=dict(parts), peaks=peaks, per_layer_bytes={
            "outside the layers" if layer is None else f"layers.{layer}": layers[layer]
            for layer in sorted(layers, key=lambda layer: math.inf if layer is None else layer)
        },
        host_bytes=simulation.host.total(), parameters=parameters, method=method,
        versions=cache.library_versions(), notes=(*([lean] if kinds else ()), *simulation.notes),
        offloaded_bytes=sum(offloaded), largest_offloaded_bytes=max(offloaded, default=0),
    )  # fmt: skip


def first_layer_saves_less(settings: Settings) -> bool:
    """Tell whether the first layer saves other tensors than the rest."""
    # the first layer's input needs no gradient and is not offloaded, nor fp32 with DoRA
    saves_inputs = settings.activation_checkpointing in (False, "offload") or settings.use_dora is True
    # with activation offloading, no copies of an earlier layer are in flight yet
    return saves_inputs or settings.activation_offloading


def _highest(simulation: Simulation, phases: tuple[str, ...]) -> Peak:
    return max((peak for (phase, _), peak in simulation.peaks.items() if phase in phases), key=Counter.total)
