"""The base model of a run, under FSDP2 with only this rank's rows of each 4-bit weight."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from transformers import PretrainedConfig, PreTrainedModel

from finetune.compat.accelerate import shard_with
from finetune.compat.transformers import quantised_on, sequential_loading
from finetune.model.build import build_base
from finetune.settings import Settings
from finetune.settings.compatibility import loads_own_rows
from finetune.system import return_freed_memory

#: The modules that use a parameter, and the parameter's name in each. Tied parameters have several.
Uses = list[tuple[torch.nn.Module, str]]


def load_base(settings: Settings, config: PretrainedConfig, device: torch.device | str | int, rank: int) -> PreTrainedModel:
    """Return the base model on `device`, with this rank's rows only where the settings allow it."""
    if loads_own_rows(settings):
        return _load_own_rows(settings, config, device, rank)
    return build_base(settings, config, device=device, weights=True, offloads=True)


def _load_own_rows(
    settings: Settings, config: PretrainedConfig, device: torch.device | str | int, rank: int
) -> PreTrainedModel:
    rows_device = "cpu" if settings.launch.offload == "cpu" else device

    def drop_other_rows(parameter: Any) -> None:
        # split as by torch.chunk: the last ranks may get fewer rows, or none
        count = -(-len(parameter) // settings.launch.num_processes)
        parameter.own_rows = parameter.data[rank * count : (rank + 1) * count].to(rows_device, copy=True)
        # until `_shard`, one element expanded to the shape: PEFT, TRL and accelerate read shape, dtype and device
        parameter.data = torch.empty(1, dtype=parameter.dtype, device=device).expand(parameter.shape)
        if (state := getattr(parameter, "quant_state", None)) is not None:
            state.to(device)  # not a parameter: every rank has the whole tables

    def on_loaded(model: Any, module: torch.nn.Module, name: str) -> None:
        parameter = module._parameters.get(name)
        tied = [model.get_parameter_or_buffer(path) for pair in model.all_tied_weights_keys.items() for path in pair]
        # transformers compares the values of tied weights once all are loaded
        if parameter is not None and all(parameter is not other for other in tied):
            drop_other_rows(parameter)
        return_freed_memory()  # quantisation on a CPU takes 14 bytes for each element of a matrix

    # no process ever holds the whole model: each weight loses the other ranks' rows when it is loaded
    with quantised_on(torch.device(device)), sequential_loading(on_loaded):
        base = build_base(settings, config, device="cpu", weights=True)
    uses: dict[Any, Uses] = {}
    for module in base.modules():
        for name, parameter in module._parameters.items():
            if parameter is not None:
                uses.setdefault(parameter, []).append((module, name))
        for tensors in (module._buffers, vars(module)):
            tensors.update({name: value.to(device) for name, value in tensors.items() if isinstance(value, torch.Tensor)})
    for parameter in uses:
        if not hasattr(parameter, "own_rows"):
            drop_other_rows(parameter)
    base.hf_device_map = {"": device}  # type: ignore[assignment]  # accelerate compares it with the rank's device
    shard_with(partial(_shard, uses))
    return base


def _shard(uses: dict[Any, Uses], shard_default: Callable[[Any, Any], Any], accelerator: Any, model: Any) -> Any:
    """Shard `model` with accelerate's function while its frozen parameters are on meta, then set this rank's rows."""
    from torch.distributed.tensor import DTensor, Shard

    for parameter, places in uses.items():
        _set_parameter(places, torch.empty(parameter.shape, dtype=parameter.dtype, device="meta"))
    prepared = shard_default(accelerator, model)
    for parameter, places in uses.items():
        module, name = places[0]
        empty: Any = module._parameters[name]
        assert isinstance(empty, DTensor) and tuple(empty.placements) == (Shard(0),)
        rows = DTensor.from_local(
            parameter.own_rows, empty.device_mesh, empty.placements, run_check=False, shape=empty.shape, stride=empty.stride()
        )
        _set_parameter(places, rows)
        if (state := getattr(parameter, "quant_state", None)) is not None:
            module.quant_state = state
    return prepared


def _set_parameter(places: Uses, data: torch.Tensor) -> None:
    parameter = torch.nn.Parameter(data, requires_grad=False)
    for module, name in places:
        module._parameters[name] = parameter
