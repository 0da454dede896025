"""FSDP2 loading in which each rank reads only its rows of a folder of quantised weights."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from transformers import PretrainedConfig, PreTrainedModel

from finetune.compat.accelerate import shard_with
from finetune.errors import DiskFull
from finetune.layers.quantised_store import LayoutMismatch, Store
from finetune.model.build import build_base
from finetune.model.quantised_cache import (
    Device,
    as_loaded,
    open_store,
    parameter_like,
    parameter_uses,
    set_parameter,
    set_value,
)
from finetune.printable import Progress
from finetune.settings import Settings


def sharded_base(settings: Settings, config: PretrainedConfig, device: Device, log: Progress) -> PreTrainedModel:
    """Return the base model without weights, which each rank reads after sharding."""
    try:
        store = open_store(settings, config, device, log)
    except (DiskFull, LayoutMismatch) as error:
        # such as a full disk: the run is still possible
        log(f"{error}. Every process will load the whole model before sharding instead.")
        return build_base(settings, config, device=device, weights=True)
    base = build_base(settings, config, device=device, weights=False)
    shard_with(Shards(base, store, device, offload=settings.launch.offload == "cpu").prepare)
    return as_loaded(base, settings)


class Shards:
    """Frozen parameters of a meta model: placeholders on `device` until `prepare` reads this rank's rows."""

    def __init__(self, base: torch.nn.Module, store: Store, device: Device, *, offload: bool) -> None:
        # `offload`: the rows stay in host memory
        self._store, self._device, self._home = store, device, "cpu" if offload else device
        #: The uses of each parameter in the model.
        self._frozen: dict[str, list[tuple[Any, str]]] = {}
        uses = parameter_uses(base)
        for name in (name for names in store.parts.values() for name in names):
            path, _, attribute = name.rpartition(".")
            old = base.get_submodule(path)._parameters.get(attribute)
            if old is None:
                set_value(base, name, store.rows(name).to(device), None, uses)
            else:
                stored, self._frozen[name] = store.tensors[name], uses[id(old)]
                # one element in memory, with the shape and dtype that PEFT, TRL and accelerate read; so adapters are created
                # as in a run that loads everything
                value = torch.empty(1, dtype=stored.dtype, device=device).expand(stored.shape)
                set_parameter(self._frozen[name], parameter_like(old, value))

    def prepare(self, shard_default: Callable[[Any, Any], Any], accelerator: Any, model: Any) -> Any:
        """Shard `model` with accelerate's function while its frozen parameters are on meta, then read this rank's rows."""
        for name, uses in self._frozen.items():
            stored = self._store.tensors[name]
            empty = torch.empty(stored.shape, dtype=stored.dtype, device="meta")
            set_parameter(uses, torch.nn.Parameter(empty, requires_grad=False))
        prepared = shard_default(accelerator, model)
        for name, uses in self._frozen.items():
            owner, attribute = uses[0]
            set_parameter(uses, self._rows(name, owner._parameters[attribute]))
            if state := self._store.quant_state(name, self._device):
                # quantisation tables are not parameters: every rank has all of them
                owner.quant_state = state
        return prepared

    def _rows(self, name: str, empty: Any) -> torch.nn.Parameter:
        from torch.distributed.tensor import DTensor, Shard

        if not isinstance(empty, DTensor):
            return torch.nn.Parameter(self._store.rows(name).to(self._device), requires_grad=False)
        mesh, rows = empty.device_mesh, self._store.tensors[name].shape[0]
        assert tuple(empty.placements) == (Shard(0),)
        # consecutive rows, as many as torch.chunk gives this rank
        rows_per_rank = -(-rows // mesh.size())
        first = min(rows, mesh.get_local_rank() * rows_per_rank)
        own = self._store.rows(name, first, min(rows - first, rows_per_rank)).to(self._home)
        whole = DTensor.from_local(own, mesh, empty.placements, run_check=False, shape=empty.shape, stride=empty.stride())
        return torch.nn.Parameter(whole, requires_grad=False)
