"""FSDP2 loading in which each rank reads only its rows of a folder of quantised weights."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from transformers import PretrainedConfig, PreTrainedModel

from finetune.compat.accelerate import shard_with
from finetune.errors import DiskFull
from finetune.layers.quantised_store import LayoutMismatch, Store, StoredTensor
from finetune.model.build import build_base
from finetune.model.quantised_cache import Device, as_loaded, open_store, parameter_uses, set_value
from finetune.printable import Progress
from finetune.settings import Settings


def sharded_base(settings: Settings, config: PretrainedConfig, device: Device, log: Progress) -> PreTrainedModel:
    """Return the base model without weights, which each rank reads after sharding."""
    try:
        store = open_store(settings, config, device, log)
    except (DiskFull, LayoutMismatch) as error:
        # such as a full disk: the run is still possible
        log(f"{error}. Every process loads the whole model before it is sharded instead.")
        return build_base(settings, config, device=device, weights=True)
    base = build_base(settings, config, device=device, weights=False)
    shard_with(Shards(base, store, device, offload=settings.launch.offload == "cpu").prepare)
    return as_loaded(base, settings)


@dataclass(frozen=True)
class _Frozen:
    """A frozen parameter: its tensor in the file, and its uses in the model."""

    name: str
    stored: StoredTensor
    uses: list[tuple[Any, str]]


class Shards:
    """The frozen parameters of a base on meta, as placeholders on `device`."""

    def __init__(self, base: torch.nn.Module, store: Store, device: Device, *, offload: bool) -> None:
        # `offload`: the rows stay in host memory
        self._store, self._device, self._home = store, device, "cpu" if offload else device
        self._frozen: list[_Frozen] = []
        uses = parameter_uses(base)
        for name in (name for names in store.parts.values() for name in names):
            path, _, attribute = name.rpartition(".")
            old = base.get_submodule(path)._parameters.get(attribute)
            if old is None:
                set_value(base, name, store.rows(name).to(device), None, uses)
            else:
                frozen = _Frozen(name, store.tensors[name], uses[id(old)])
                self._frozen.append(frozen)
                _set(frozen, _placeholder(old, frozen.stored, device))

    def prepare(self, shard_default: Callable[[Any, Any], Any], accelerator: Any, model: Any) -> Any:
        """Shard `model` by accelerate's function while its frozen parameters are on meta, then read this rank's rows."""
        for frozen in self._frozen:
            empty = torch.empty(frozen.stored.shape, dtype=frozen.stored.dtype, device="meta")
            _set(frozen, torch.nn.Parameter(empty, requires_grad=False))
        prepared = shard_default(accelerator, model)
        for frozen in self._frozen:
            owner, attribute = frozen.uses[0]
            _set(frozen, self._rows(frozen, owner._parameters[attribute]))
            if state := self._store.quant_state(frozen.name, self._device):
                # the tables are no parameters: every rank has all of them
                owner.quant_state = state
        return prepared

    def _rows(self, frozen: _Frozen, empty: Any) -> torch.nn.Parameter:
        from torch.distributed.tensor import DTensor, Shard

        if not isinstance(empty, DTensor):
            return torch.nn.Parameter(self._store.rows(frozen.name).to(self._device), requires_grad=False)
        mesh, rows = empty.device_mesh, frozen.stored.shape[0]
        assert tuple(empty.placements) == (Shard(0),)
        # consecutive rows, as many as torch.chunk gives this rank
        rows_per_rank = -(-rows // mesh.size())
        first = min(rows, mesh.get_local_rank() * rows_per_rank)
        own = self._store.rows(frozen.name, first, min(rows - first, rows_per_rank)).to(self._home)
        whole = DTensor.from_local(own, mesh, empty.placements, run_check=False, shape=empty.shape, stride=empty.stride())
        return torch.nn.Parameter(whole, requires_grad=False)


def _placeholder(old: Any, stored: StoredTensor, device: Device) -> torch.nn.Parameter:
    from bitsandbytes.nn import Params4bit

    # one element in memory, with the shape and dtype that PEFT, TRL and accelerate read; so adapters are created as in a run
    # that loads everything
    value = torch.empty(1, dtype=stored.dtype, device=device).expand(stored.shape)
    if isinstance(old, Params4bit):
        return Params4bit(value, requires_grad=False, **{**vars(old), "bnb_quantized": True})
    return torch.nn.Parameter(value, requires_grad=False)


def _set(frozen: _Frozen, value: torch.nn.Parameter) -> None:
    for module, name in frozen.uses:
        module._parameters[name] = value
