"""Allocated bytes of a step by part, from the cache or a dry run. Importing this needs no torch."""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from functools import cached_property
from operator import attrgetter
from typing import TYPE_CHECKING, Any

from finetune.memory import cache
from finetune.memory.allocator_replay import MicroBatchEvents, Replay, micro_batch_widths, replay, replay_widths
from finetune.memory.caching_allocator import OutOfMemory
from finetune.memory.forecast import PARTS, Batch
from finetune.memory.trace import NotRepeated
from finetune.settings import resolved
from finetune.settings.compatibility import padding_multiple
from finetune.settings.optimizers import OPTIMIZERS
from finetune.settings.schema import Decides, settings_that_decide

if TYPE_CHECKING:
    from transformers import PretrainedConfig

    from finetune.memory.depth import Simulation
    from finetune.memory.forecast import RowShape
    from finetune.memory.tracker import Peak
    from finetune.settings import Settings

#: How a setting that decides bytes enters the cache key, if not by its value. None: not at all, because the batch's shape, the
#: card's capability or the configuration covers the setting.
_KEY_ENTRIES: dict[str, Callable[[Settings], Any] | None] = {
    # micro-batches with images wait on the GPU, so their number counts
    "gradient_accumulation_steps": lambda settings: (
        settings.gradient_accumulation_steps if settings.vision else settings.gradient_accumulation_steps != 1
    ),
    # layers in a file pass through the same buffers as layers in host memory
    "layer_offloading": lambda settings: settings.layer_offloading is not False,
    "offloaded_layers": lambda settings: settings.offloaded_layers if settings.layer_offloading else 0,
    "lora_dropout": lambda settings: settings.lora_dropout > 0,
    "launch": lambda settings: settings.launch.is_zero3,  # it needs reentrant checkpointing; nothing else matters here
    "loss_type": lambda settings: settings.has_kl,
    "dataset": None, "max_length": None, "per_device_train_batch_size": None, "per_device_eval_batch_size": None,
    "eval_steps": None, "gpu": None, "model_name_or_path": None,
}  # fmt: skip
#: Phases of the dry run that make up a training step.
_TRAIN_PHASES = ("forward", "loss", "auxiliary loss", "loss backward", "backward", "optimizer")
#: Compute capability of a dry run when no card is given: Ampere.
DEFAULT_CAPABILITY = (8, 0)
#: Last simulations of this process, newest last: `mix_layers` reuses them for plans with every n-th layer checkpointed.
_SIMULATED: OrderedDict[str, tuple[Simulation, str]] = OrderedDict()
_MAX_SIMULATED = 8


@dataclass(frozen=True)
class DryRun:
    """Allocated bytes of one plan."""

    #: Bytes by part, at the training peak.
    parts: dict[str, int]
    #: Peak bytes of each phase.
    peaks: dict[str, int]
    #: Number of decoder layers.
    layers: int
    #: Pinned or managed host memory of activations, optimizer states and offloaded layers.
    host_bytes: int
    #: Number of parameters of the base model.
    parameters: int
    method: str
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
    """A run's step with micro-batches of its longest rows, cached on disk. Raises RecipeError for an unusable model."""

    config: dict[str, Any]
    settings: Settings
    rows: RowShape
    #: Compute capability of the GPU; None: the run is on the CPU.
    capability: tuple[int, int] | None = DEFAULT_CAPABILITY

    def dry_run(self) -> DryRun:
        """Return the allocated bytes."""

        def simulated_bytes() -> DryRun:
            from finetune.compat.trl import import_libraries

            import_libraries()
            from finetune.memory.depth import inspect_layers

            simulation, method = self.simulated()
            _, parameters = inspect_layers(self._model_config)
            return ledger_of(simulation, self.capability, parameters=parameters, method=method)

        return cache.cached(self._key("dry run"), DryRun, simulated_bytes)

    def replayed(self, *, expandable: bool, limit: int | None = None) -> Replay | None:
        """Replay the events on torch's allocator; None if their order is unknown or `limit` (reserved bytes) too low."""
        # offloading copies activations on another stream, at unknown moments
        if self.settings.activation_checkpointing == "offload":
            return None

        def replayed_peaks() -> Replay | None:
            from finetune.memory.simulate import garbage_collection_paused

            with garbage_collection_paused(), suppress(OutOfMemory):
                trace = self.simulated()[0].trace()
                return replay(trace, expandable=expandable, limit=limit) if trace else None
            return None  # out of memory at the limit

        return cache.cached(self._key("replay", expandable=expandable, limit=limit), Replay | None, replayed_peaks)

    def reserved_over(self, lengths: Sequence[int], *, expandable: bool) -> int | None:
        """Return the peak reserved bytes over steps with rows of these lengths; None without a trace."""
        settings, accumulation = self.settings, self.settings.gradient_accumulation_steps
        widths = micro_batch_widths(lengths, settings.per_device_train_batch_size, self.rows.tokens, accumulation)

        def reserved_by_steps() -> int | None:
            from finetune.memory.simulate import garbage_collection_paused

            # traces at two widths show how each size grows with the width
            tokens, narrow_tokens = self.rows.tokens, self.rows.tokens // 2
            narrow_step = replace(self, rows=replace(self.rows, tokens=narrow_tokens))
            with garbage_collection_paused(), suppress(NotRepeated):
                wide, narrow = (step.simulated()[0].trace() for step in (self, narrow_step))
                if wide and narrow:
                    micro_batches = MicroBatchEvents(wide, tokens, narrow, narrow_tokens)
                    return replay_widths(wide, micro_batches, widths, accumulation, expandable=expandable)
            return None

        key = self._key("growth", expandable=expandable, widths=widths, accumulation=accumulation)
        return cache.cached(key, int | None, reserved_by_steps)

    def _key(self, kind: str, **more: Any) -> str:
        entries = {name: _KEY_ENTRIES.get(name, attrgetter(name)) for name in settings_that_decide(Decides.BYTES)}
        settings = {name: entry_of(self.settings) for name, entry_of in entries.items() if entry_of is not None}
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
        """Return the simulation, and a description of how many layers ran."""
        from finetune.memory.depth import can_mix, inspect_layers, mix_layers, mix_resident, simulate_deep
        from finetune.memory.simulate import simulate

        config, settings, every = self._model_config, self.settings, self.settings.activation_checkpointing_every_n_layers
        kinds, _ = inspect_layers(config)
        layers, is_uniform = len(kinds), len(set(kinds)) == 1
        if every > 1 and can_mix(settings, is_uniform):
            # faster than a dry run of every n-th layer checkpointed, but yields peaks without events to replay
            every_layer = {"activation_checkpointing_every_n_layers": 1}
            recomputed, method = self._with(activation_checkpointing=True, **every_layer).simulated()
            uncheckpointed, _ = self._with(activation_checkpointing=False, **every_layer).simulated()
            return mix_layers(recomputed, uncheckpointed, every), method
        offloads_some_layers = settings.layer_offloading is not False and settings.offloaded_layers < layers
        if offloads_some_layers and is_uniform:
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
                # offloaded layers are not in a repeating pattern
                full_depth=OPTIMIZERS[settings.optim].small_states or offloads_some_layers,
            )
            if len(_SIMULATED) > _MAX_SIMULATED:
                _SIMULATED.popitem(last=False)
        return _SIMULATED[key]


def batch_of(settings: Settings, rows: RowShape) -> Batch:
    """Return the largest micro-batches of training and evaluation."""
    is_packed, examples = settings.packing is True, settings.per_device_train_batch_size
    sequences = settings.training_method.sequences
    padded = sequences * examples > 1 and not is_packed
    documents = max(1, rows.tokens // 256) if is_packed else 1  # assumes examples of 256 tokens
    mismatched_tokens = rows.mismatched_tokens if settings.has_kl else None

    def batch(shape: RowShape, examples: int) -> Batch:
        count, multiple = sequences * examples, padding_multiple(settings, examples)
        tokens = -(-shape.tokens // multiple) * multiple
        trained_tokens = round(shape.trained_share * count * (shape.tokens - 1))
        pictures = shape.pictures if settings.vision is True else ()
        return Batch(count, tokens, trained_tokens, padded, documents, mismatched_tokens, pictures)

    training = batch(rows, examples)
    if settings.eval_steps == 0:
        return training
    return replace(training, held_out=batch(rows.held_out or rows, settings.per_device_eval_batch_size))


def ledger_of(simulation: Simulation, capability: tuple[int, int] | None, *, parameters: int, method: str) -> DryRun:
    """Return the parts and peaks of a simulated step."""
    from finetune.memory.rules import cublas_workspace_bytes
    from finetune.memory.tracker import OFFLOADED

    # cuBLAS handles of the main thread and of the autograd thread
    workspace_bytes = 2 * cublas_workspace_bytes(capability)
    train_peak = _highest_peak(simulation, _TRAIN_PHASES)
    parts = Counter({part: 0 for part in PARTS})
    for (part, _), size in train_peak.items():
        parts[part] += size
    parts["workspace"] += workspace_bytes
    layers = {layer for _, layer in train_peak if layer is not None}
    load_peak = _highest_peak(simulation, ("load", "adapters", "casts"))
    peaks = {"load": load_peak.total(), "train": train_peak.total() + workspace_bytes}
    for phase in ("eval", "save"):
        sizes = [peak.total() for (name, _), peak in simulation.peaks.items() if name == phase]
        peaks[phase] = max(sizes) + workspace_bytes if sizes else 0
    offloaded = [size for (part, _), size in simulation.host.items() if part == OFFLOADED]
    return DryRun(
        parts=dict(parts), peaks=peaks, layers=len(layers),
        host_bytes=simulation.host.total(), parameters=parameters, method=method,
        notes=simulation.notes,
        offloaded_bytes=sum(offloaded), largest_offloaded_bytes=max(offloaded, default=0),
    )  # fmt: skip


def first_layer_saves_less(settings: Settings) -> bool:
    """Tell whether the first layer saves other tensors than the next layers."""
    # the first layer's input needs no gradient and is not offloaded, nor fp32 with DoRA
    return settings.activation_checkpointing in (False, "offload") or settings.use_dora is True


def _highest_peak(simulation: Simulation, phases: tuple[str, ...]) -> Peak:
    return max((peak for (phase, _), peak in simulation.peaks.items() if phase in phases), key=Counter.total)
