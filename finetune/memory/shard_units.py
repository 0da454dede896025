"""Parameters that FSDP and DeepSpeed shard, in units that are all-gathered together."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

from finetune.memory import cache
from finetune.settings import Settings
from finetune.settings.compatibility import shards_weights
from finetune.settings.schema import Decides, settings_that_decide

#: Units besides the layers: the input embedding, the output layer (with a tied embedding), everything else.
EMBEDDING, HEAD, REST = "embedding", "head", "rest"


@dataclass(frozen=True)
class Parameter:
    """A parameter as rows along dimension 0."""

    rows: int
    row_bytes: int
    item_bytes: int
    trained: bool

    @property
    def size_bytes(self) -> int:
        return self.rows * self.row_bytes


@dataclass(frozen=True)
class Unit:
    """Parameters that are all-gathered together; `name` is `layers.0`, ..., or EMBEDDING, HEAD or REST."""

    name: str
    parameters: tuple[Parameter, ...]


def units_of(config: dict[str, Any], settings: Settings) -> tuple[Unit, ...]:
    """Return the units of the model in `config` with adapters; cached, so a repeated plan needs no torch.

    Raises RecipeError for a model that can't be built.
    """
    deciding_settings = {name: getattr(settings, name) for name in settings_that_decide(Decides.PARAMETERS)}
    deciding_settings["shards_weights"] = shards_weights(settings.launch)  # 4-bit weights are then stored in another dtype
    key = cache.key_of(kind="units", config=config, settings=deciding_settings)
    units = cache.cached(key, lambda: [asdict(unit) for unit in _full_units(config, settings)])
    return tuple(Unit(unit["name"], tuple(Parameter(**parameter) for parameter in unit["parameters"])) for unit in units)


def _full_units(values: dict[str, Any], settings: Settings) -> tuple[Unit, ...]:
    from finetune.memory.depth import at_depth, layer_kinds, plan_depth
    from finetune.model.transformers_config import config_from

    config = config_from(values, settings)
    depth = plan_depth(layer_kinds(config))
    shallow_units = _units(at_depth(config, depth.run), settings)
    # layers repeat, so a shallow model shows the units of all
    layers = [Unit(f"layers.{index}", shallow_units[f"layers.{depth.shallow_index(index)}"]) for index in range(depth.full)]
    return (*layers, *(Unit(name, shallow_units[name]) for name in (EMBEDDING, HEAD, REST) if name in shallow_units))


def _units(config: Any, settings: Settings) -> dict[str, tuple[Parameter, ...]]:
    from finetune.compat.bitsandbytes import own_quantisation_maps, without_cpu_repacking
    from finetune.compat.torch import fake_tensor_mode
    from finetune.memory.fake_model import fake_dora_weights, layer_number, materialise
    from finetune.memory.tracker import StorageTracker
    from finetune.model.adapters import attach_adapters
    from finetune.model.build import build_base
    from finetune.model.quantisation import model_dtype

    with without_cpu_repacking(), fake_dora_weights():
        model = attach_adapters(build_base(settings, config, device="cpu", weights=False), settings)
        with own_quantisation_maps(), fake_tensor_mode():
            materialise(model, StorageTracker({}), dtype=model_dtype(settings))
    base: Any = model.get_base_model()
    ends = {id(base.get_input_embeddings().weight): EMBEDDING}
    if base.get_output_embeddings() is not None:
        # overwrites a tied embedding, which belongs to the output layer
        ends[id(base.get_output_embeddings().weight)] = HEAD
    by_unit: dict[str, list[Parameter]] = {}
    for name, parameter in model.named_parameters():
        layer, rows = layer_number(name), parameter.shape[0] if parameter.dim() else 1
        unit = ends.get(id(parameter), REST) if layer is None else f"layers.{layer}"
        size = parameter.numel() * parameter.element_size()
        by_unit.setdefault(unit, []).append(
            Parameter(rows, size // max(1, rows), parameter.element_size(), parameter.requires_grad)
        )
    return {name: tuple(parameters) for name, parameters in by_unit.items()}
