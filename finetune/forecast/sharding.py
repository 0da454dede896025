"""What each card holds when several share a model: named rules, each with its source, applied to the dry run of one card.

The dry run is the same for every strategy; what is split leaves its ledger, what is put together again comes in as `gathered`.
No rule has been measured on several cards. Where the moment of a peak is not certain, the higher number is taken.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from finetune.forecast.shard_units import EMBEDDING, HEAD, REST

if TYPE_CHECKING:
    from finetune.forecast.ledger import DryRun
    from finetune.forecast.shard_units import Parameter, Unit
    from finetune.recipe import Settings


#: The caching allocator's smallest block, as in tracker.py, which needs torch.
_BLOCK_BYTES = 512
#: DeepSpeed's `stage3_max_live_parameters` and `stage3_max_reuse_distance`, which the launch leaves at their default: elements.
MOST_LIVE = 10**9
#: DeepSpeed's buffers for files: `buffer_count` x `buffer_size` elements of `offload_param`, at their default.
FILE_BUFFERS = 5 * 10**8


@dataclass(frozen=True)
class ShardingRule:
    """One part of a strategy: what happens on each card, and where in the library that can be read."""

    name: str
    what: str
    source: str


RULES = {
    "fsdp": (
        ShardingRule(
            "split parameters",
            "each card keeps ceil(rows / cards) rows of every parameter, all cards padded to the same; the tables of 4-bit "
            "weights are no parameters and stay whole",
            "torch/distributed/fsdp/_fully_shard/_fsdp_param.py, FSDPParam._init_sharded_param",
        ),
        ShardingRule(
            "units",
            "each decoder layer, the input table, the output layer and the rest are put together at once; the output layer is "
            "kept from forward to backward, and so is the rest",
            "accelerate/utils/fsdp_utils.py, fsdp2_prepare_model",
        ),
        ShardingRule(
            "gathering",
            "a unit's parameters, the buffer they were received in and the buffer of the next one. Only two are handed out at "
            "once; the third is there because buffers belong to another stream, whose pool lends nothing to the first",
            "torch/distributed/fsdp/_fully_shard/_fsdp_param_group.py, FSDPParamGroup.wait_for_unshard",
        ),
        ShardingRule(
            "gradients",
            "whole until the last micro-batch (no_sync), then added up through buffers of two units",
            "accelerate/accelerator.py, Accelerator.no_sync; _fsdp_param_group.py, FSDPParamGroup.post_backward",
        ),
        ShardingRule(
            "optimizer",
            "states are made for a card's own rows",
            "torch/optim/adamw.py on the DTensors of FSDPParam.sharded_param",
        ),
        ShardingRule(
            "loading",
            "each card first holds the whole model, and its own rows beside it until all is split (original_sd)",
            "finetune/run/worker.py, Worker._build; accelerate/utils/fsdp_utils.py, fsdp2_prepare_model",
        ),
        ShardingRule(
            "offload to host memory",
            "a card's rows, their gradients and the optimizer lie in pinned memory; two units' rows are on the card at a time",
            "torch/distributed/fsdp/_fully_shard/_fsdp_param.py, FSDPParam.all_gather_inputs",
        ),
    ),
    "deepspeed": (
        ShardingRule(
            "ZeRO-2",
            "weights and adapters whole; optimizer states and fp32 copies of the adapters split",
            "deepspeed/runtime/zero/stage_1_and_2.py, DeepSpeedZeroOptimizer",
        ),
        ShardingRule(
            "ZeRO-3 split parameters",
            "each card keeps ceil(elements / cards) of every parameter; those of fewer than 10 x hidden elements are kept "
            "whole, too (stage3_param_persistence_threshold)",
            "deepspeed/runtime/zero/partition_parameters.py, Init._partition_param; transformers/integrations/deepspeed.py, "
            "trainer_config_finalize",
        ),
        ShardingRule(
            "ZeRO-3 gathering",
            "up to a thousand million elements stay put together (stage3_max_live_parameters), and what is being fetched",
            "deepspeed/runtime/zero/partitioned_param_coordinator.py, PartitionedParameterCoordinator",
        ),
        ShardingRule(
            "gradients",
            "taken as whole; two buffers of hidden x hidden elements (reduce_bucket_size, overlap_comm)",
            "deepspeed/runtime/zero/stage_1_and_2.py, reduce_independent_p_g_buckets_and_remove_grads; stage3.py",
        ),
        ShardingRule(
            "loading",
            "each card first holds the whole model, and its own part beside it until all is split (zero3_init_flag is off)",
            "finetune/run/worker.py, Worker._build; finetune/distributed/configuration.py, accelerate_configuration",
        ),
        ShardingRule(
            "offload",
            "parameters (ZeRO-3) and optimizer lie in host memory, or on a drive behind buffers in host memory",
            "deepspeed/runtime/zero/offload_config.py",
        ),
    ),
}


def per_card(run: DryRun, units: tuple[Unit, ...], settings: Settings) -> DryRun:
    """The dry run of one card as each of `launch.num_processes` cards sees it; DDP's is the run itself.

    `host_bytes` becomes that of all processes of a machine.
    """
    launch = settings.launch
    if launch.strategy == "fsdp":
        split = _fsdp(units, launch.num_processes, launch.offload)
    elif launch.strategy == "deepspeed":
        split = _deepspeed(units, settings)
    else:
        return run
    return _applied(run, units, split, settings)


@dataclass(frozen=True)
class Split:
    """What a strategy does to one card. Bytes.

    `kept`: of each unit, (frozen, trained) bytes that stay; `states`: share of the optimizer that stays; `masters`: copies that
    come with it; `gathered`: put together at the worst moment, and buffers; `loading`: beside the whole model while it is
    split; `host`: of each process.
    """

    kept: dict[str, tuple[int, int]]
    states: float
    masters: int
    gathered: int
    loading: int
    host: int


def _fsdp(units: tuple[Unit, ...], cards: int, offload: str) -> Split:
    shards = {unit.name: _sums(unit, lambda parameter: _rows_of_one(parameter, cards)) for unit in units}
    own = sum(map(sum, shards.values()))
    gathered = gathered_by_fsdp(units, cards) + 2 * max(cards * trained for _, trained in shards.values())
    if offload == "none":
        return Split(shards, _share(units, shards), 0, gathered, own, 0)
    nothing = dict.fromkeys(shards, (0, 0))
    trained = sum(part for _, part in shards.values())
    host = sum(_pinned(_rows_of_one(parameter, cards)) for unit in units for parameter in unit.parameters)
    arriving = 2 * max(map(sum, shards.values()))
    # beside the rows: their gradients, and the two states of AdamW
    return Split(nothing, 0.0, 0, gathered + arriving, 0, host + 3 * trained)


def gathered_by_fsdp(units: tuple[Unit, ...], cards: int) -> int:
    """Most bytes that FSDP puts together at once on a card: unit, its buffer, and the buffer of the next one.

    The output layer waits for its backward; a table tied to it is used, and so there, from the beginning.
    """
    whole = {unit.name: sum(_block(cards * _rows_of_one(parameter, cards)) for parameter in unit.parameters) for unit in units}
    layer = max((size for name, size in whole.items() if name.startswith("layers.")), default=0)
    embedding, head, rest = (whole.get(name, 0) for name in (EMBEDDING, HEAD, REST))
    tied = head if not embedding else 0
    moments = {
        "first layer comes": 2 * embedding + layer,
        "layers": tied + 3 * layer,
        "loss": 2 * head + layer,
        "backward": head + layer + max(layer, embedding),
        "tied table comes": 2 * tied + layer,
    }
    return max(moments.values()) + 2 * rest


def _deepspeed(units: tuple[Unit, ...], settings: Settings) -> Split:
    launch, item, hidden = settings.launch, 4 if settings.dtype == "float32" else 2, _hidden(units)
    cards, away = launch.num_processes, launch.offload != "none"
    whole = {unit.name: _sums(unit, lambda parameter: parameter.size_bytes) for unit in units}
    adapters = sum(trained for _, trained in whole.values())
    part = -(-adapters // cards)  # of the adapters, in fp32: master copy, gradient of the step
    buffers = 2 * hidden * hidden * item + (0 if away else part)
    states, masters = (0.0, 0) if away else (1 / cards, part)
    host = 4 * part if away else 0  # master copy, gradient, two states of AdamW
    if launch.zero_stage == 2:
        return Split(whole, states, masters, buffers, 0, host)
    shards = {unit.name: _sums(unit, lambda parameter: _elements_of_one(parameter, cards)) for unit in units}
    own, every = sum(map(sum, shards.values())), sum(map(sum, whole.values()))
    persistent = sum(
        _block(parameter.size_bytes)
        for unit in units for parameter in unit.parameters if parameter.size_bytes < 10 * hidden * parameter.item_bytes
    )  # fmt: skip
    fetched = max(map(sum, whole.values())) + round(0.9 * hidden * hidden) * item  # stage3_prefetch_bucket_size
    gathered = min(every, persistent + MOST_LIVE * item + fetched) + buffers
    if not away:
        return Split(shards, states, masters, gathered, own, host)
    arriving = 2 * max(map(sum, shards.values()))
    host += sum(_pinned(_elements_of_one(parameter, cards)) for unit in units for parameter in unit.parameters)
    host += FILE_BUFFERS * item if launch.offload == "nvme" else 0
    return Split(dict.fromkeys(shards, (0, 0)), states, masters, gathered + arriving, 0, host)


def _hidden(units: tuple[Unit, ...]) -> int:
    """Width of the model, which DeepSpeed's `auto` buffers follow: that of its tables."""
    ends = [parameter for unit in units if unit.name in (EMBEDDING, HEAD) for parameter in unit.parameters]
    return max(parameter.row_bytes // parameter.item_bytes for parameter in ends)


def _applied(run: DryRun, units: tuple[Unit, ...], split: Split, settings: Settings) -> DryRun:
    whole = {unit.name: _sums(unit, lambda parameter: parameter.size_bytes) for unit in units}
    saved = {name: (frozen - split.kept[name][0], trained - split.kept[name][1]) for name, (frozen, trained) in whole.items()}
    parts = dict(run.parts)
    parts["weights"] -= sum(frozen for frozen, _ in saved.values())
    parts["adapters"] -= sum(trained for _, trained in saved.values())
    parts["optimizer"] = math.ceil(run.parts["optimizer"] * split.states) + split.masters
    parts["gathered"] = split.gathered
    # What was resident in every phase and is not now: the phases' peaks fall by it.
    less = run.allocated_bytes - sum(parts.values())
    peaks = {phase: size - less if size else 0 for phase, size in run.peaks.items()}
    loaded = sum(map(sum, whole.values())) + split.loading
    layers = {
        name: size - sum(saved.get(name, (0, 0))) for name, size in run.per_layer_bytes.items() if name.startswith("layers.")
    }
    layers["outside the layers"] = sum(parts.values()) - sum(layers.values())
    here = settings.launch.num_processes // settings.launch.num_machines
    return dataclasses.replace(
        run, parts=parts, per_layer_bytes=layers, peaks={**peaks, "load": max(run.peaks["load"], loaded)},
        host_bytes=here * (run.host_bytes + split.host), notes=(*run.notes, _note(settings)),
    )  # fmt: skip


def _note(settings: Settings) -> str:
    launch = settings.launch
    name = f"ZeRO-{launch.zero_stage}" if launch.strategy == "deepspeed" else "FSDP"
    offload = "" if launch.offload == "none" else f" with offload to {launch.offload}"
    return f"what each of {launch.num_processes} cards takes under {name}{offload} is by rule, not measured on several cards"


def _sums(unit: Unit, size: Callable[[Parameter], int]) -> tuple[int, int]:
    """Bytes of the allocator for a unit's frozen and trained parameters when each takes `size(parameter)`."""
    sums = [0, 0]
    for parameter in unit.parameters:
        sums[parameter.trained] += _block(size(parameter))
    return sums[0], sums[1]


def _share(units: tuple[Unit, ...], shards: dict[str, tuple[int, int]]) -> float:
    whole = sum(parameter.size_bytes for unit in units for parameter in unit.parameters if parameter.trained)
    return min(1.0, sum(trained for _, trained in shards.values()) / max(1, whole))


def _rows_of_one(parameter: Parameter, cards: int) -> int:
    return -(-parameter.rows // cards) * parameter.row_bytes


def _elements_of_one(parameter: Parameter, cards: int) -> int:
    return -(-parameter.size_bytes // parameter.item_bytes // cards) * parameter.item_bytes


def _block(size: int) -> int:
    return -(-size // _BLOCK_BYTES) * _BLOCK_BYTES


def _pinned(size: int) -> int:
    """torch's pool of pinned memory hands out powers of two (CachingHostAllocator.h)."""
    return 1 << (size - 1).bit_length() if size else 0
