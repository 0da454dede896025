"""Bytes of torch's allocator for a plan's settings: from the cache, else by a dry run. Importing this needs no torch."""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING, Any

from finetune.forecast import cache
from finetune.forecast.forecast import PARTS
from finetune.recipe import resolved
from finetune.recipe.compatibility import is_zero3
from finetune.recipe.schema import Decides, settings_that_decide

if TYPE_CHECKING:
    from transformers import PretrainedConfig

    from finetune.forecast.simulate import Batch, Simulation
    from finetune.forecast.tracker import Peak
    from finetune.recipe import Settings

#: How a setting that decides bytes reaches one card's step, where not as it stands; those without a key come as the batch and
#: the card that are forecast.
_REDUCED: dict[str, Callable[[Settings], Any] | None] = {
    "gradient_accumulation_steps": lambda settings: settings.gradient_accumulation_steps != 1,
    "lora_dropout": lambda settings: settings.lora_dropout > 0,
    "launch": lambda settings: is_zero3(settings.launch),  # of the launch only this: reentrant checkpointing
    "dataset": None, "max_length": None, "per_device_train_batch_size": None, "per_device_eval_batch_size": None,
    "eval_steps": None, "gpu": None, "model_name_or_path": None,
}  # fmt: skip
#: Phases of the dry run that make up a training step.
_TRAIN = ("forward", "loss", "loss backward", "backward", "optimizer")
#: Ampere: what a dry run stands for when no card is given.
USUAL_CAPABILITY = (8, 0)
#: Simulations of this process that plans with every n-th layer recomputed are made from, newest last.
_SIMULATED: OrderedDict[str, tuple[Simulation, str]] = OrderedDict()
_MOST_SIMULATED = 8


@dataclass(frozen=True)
class DryRun:
    """Allocated bytes of one plan. `parts` is the ledger at the training peak, `peaks` the peak of each phase.

    `per_layer_bytes` splits the training peak by layer: `layers.0`, ..., and `outside the layers`. `host_bytes` is pinned or
    managed host memory of activations and optimizer states. `parameters` counts the base model's.
    """

    parts: dict[str, int]
    peaks: dict[str, int]
    per_layer_bytes: dict[str, int]
    host_bytes: int
    parameters: int
    method: str
    versions: dict[str, str] = field(default_factory=dict)
    notes: tuple[str, ...] = ()

    @property
    def allocated_bytes(self) -> int:
        """The training peak."""
        return sum(self.parts.values())


def dry_run(
    config: PretrainedConfig | dict[str, Any],
    settings: Settings,
    *,
    micro_batch: int,
    tokens: int,
    trained_tokens: int | None = None,
    capability: tuple[int, int] | None = USUAL_CAPABILITY,
) -> DryRun:
    """The allocated bytes of a step with `micro_batch` rows of `tokens`, of which `trained_tokens` in all are learned.

    `config` is a configuration or the content of a config.json. `capability` is the card's; None: the run is on a CPU. Kept on
    disk by configuration, settings, versions and this code. Raises RecipeError for what can't be built.
    """
    values = config if isinstance(config, dict) else config.to_dict()
    trained = micro_batch * (tokens - 1) if trained_tokens is None else min(trained_tokens, micro_batch * (tokens - 1))
    eval_rows = 0 if settings.eval_steps == 0 else settings.per_device_eval_batch_size
    shape: dict[str, Any] = {
        "rows": micro_batch, "tokens": tokens, "trained_tokens": trained,
        "padded": micro_batch > 1 and settings.packing is not True,
        "documents": max(1, tokens // 256) if settings.packing is True else 1,
        "eval_rows": eval_rows,
    }  # fmt: skip
    key = cache.key_of(kind="dry run", config=values, settings=_deciding(settings), shape=shape, capability=capability)
    known = cache.read(key)
    if known is not None:
        return DryRun(**{**known, "notes": tuple(known["notes"])})
    from finetune.forecast.simulate import Batch

    made = _made(values, settings, Batch(**shape), capability)
    cache.write(key, asdict(made))
    return made


def _deciding(settings: Settings) -> dict[str, Any]:
    """What of the settings decides where bytes are, as the schema says."""
    key: dict[str, Any] = {}
    for name in settings_that_decide(Decides.BYTES):
        reduce = _REDUCED.get(name, lambda settings, name=name: getattr(settings, name))
        if reduce is not None:
            key[name] = reduce(settings)
    return key


def _made(values: dict[str, Any], settings: Settings, batch: Batch, capability: tuple[int, int] | None) -> DryRun:
    from finetune.forecast.depth import count_parameters
    from finetune.forecast.rules import cublas_workspace_bytes
    from finetune.model.build import config_from

    config = config_from(values, settings)
    simulation, method = _simulated(config, settings, batch, capability)
    # One cuBLAS handle of the main thread and one of the thread that runs backward.
    workspace = 0 if capability is None else 2 * cublas_workspace_bytes(capability)
    top = _highest(simulation, _TRAIN)
    parts = Counter({part: 0 for part in PARTS})
    layers: Counter[str] = Counter()
    for (part, layer), size in top.by_tag.items():
        parts[part] += size
        layers["outside the layers" if layer is None else f"layers.{layer}"] += size
    parts["workspace"] += workspace
    layers["outside the layers"] += workspace
    peaks = {"load": _highest(simulation, ("load",)).total_bytes, "train": top.total_bytes + workspace}
    for phase in ("eval", "save"):
        peaks[phase] = _highest(simulation, (phase,)).total_bytes + workspace if _has(simulation, phase) else 0
    return DryRun(
        parts=dict(parts), peaks=peaks, per_layer_bytes=dict(sorted(layers.items(), key=_layer_order)),
        host_bytes=simulation.host.total_bytes, parameters=count_parameters(config), method=method,
        versions=cache.library_versions(), notes=simulation.notes,
    )  # fmt: skip


def _simulated(
    config: PretrainedConfig, settings: Settings, batch: Batch, capability: tuple[int, int] | None
) -> tuple[Simulation, str]:
    from finetune.forecast.depth import has_layers_alike, simulate_deep
    from finetune.forecast.mixed_layers import can_mix, mix_layers
    from finetune.forecast.simulate import simulate

    every = settings.activation_checkpointing_every_n_layers
    if every > 1 and can_mix(settings, has_layers_alike(config)):
        recomputed, method = _simulated(config, _recomputing(settings, True), batch, capability)
        kept, _ = _simulated(config, _recomputing(settings, False), batch, capability)
        return mix_layers(recomputed, kept, every), method
    key = cache.key_of(config=config.to_dict(), settings=_deciding(settings), batch=asdict(batch), capability=capability)
    if key not in _SIMULATED:
        _SIMULATED[key] = simulate_deep(
            config,
            lambda shallow: simulate(shallow, settings, batch, capability),
            every,
            unlike_first=_keeps_less_in_first(settings),
            whole=settings.optim == "adafactor",  # its states are small tensors by the hundred, which few layers don't show
        )
        while len(_SIMULATED) > _MOST_SIMULATED:
            _SIMULATED.popitem(last=False)
    return _SIMULATED[key]


def _keeps_less_in_first(settings: Settings) -> bool:
    """Nothing before the first layer is trained; its input is on the card anyway; DoRA makes that of the others fp32."""
    return settings.activation_checkpointing in (False, "offload") or settings.use_dora is True


def _recomputing(settings: Settings, all_layers: bool) -> Settings:
    return resolved(settings, activation_checkpointing=all_layers, activation_checkpointing_every_n_layers=1)


def _has(simulation: Simulation, phase: str) -> bool:
    return any(place == phase for place, _ in simulation.peaks)


def _highest(simulation: Simulation, phases: tuple[str, ...]) -> Peak:
    return max((peak for (phase, _), peak in simulation.peaks.items() if phase in phases), key=lambda peak: peak.total_bytes)


def _layer_order(item: tuple[str, int]) -> tuple[int, int]:
    name = item[0]
    return (0, int(name.rpartition(".")[2])) if name.startswith("layers.") else (1, 0)
