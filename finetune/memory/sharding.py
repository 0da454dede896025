"""Memory of one rank under FSDP or DeepSpeed: rules, each with its source, applied to the dry run of one GPU."""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Callable
from dataclasses import dataclass
from operator import attrgetter
from typing import TYPE_CHECKING, Any

from finetune.memory import cache
from finetune.memory.caching_allocator import pinned_bytes, rounded
from finetune.settings import Settings
from finetune.settings.compatibility import loads_own_rows
from finetune.settings.schema import Decides, settings_that_decide

if TYPE_CHECKING:
    from finetune.memory.ledger import DryRun

#: Most parameters that stay gathered: the defaults of `stage3_max_live_parameters` and `stage3_max_reuse_distance`.
MAX_LIVE_ELEMENTS = 10**9
#: Elements of DeepSpeed's NVMe buffers: `buffer_count` x `buffer_size` of `offload_param`, at their defaults.
NVME_BUFFER_ELEMENTS = 5 * 10**8
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


#: Parameters that are all-gathered together, by name: `layers.0`, ..., or EMBEDDING, HEAD or REST.
Units = dict[str, tuple[Parameter, ...]]


@dataclass(frozen=True)
class Sharded:
    """Memory of one rank."""

    #: Frozen and trained bytes on the GPU.
    resident_bytes: tuple[int, int]
    #: Share (0 to 1) of the optimizer states on the GPU.
    optimizer_share: float
    #: All-gathered parameters at the peak, and buffers.
    gathered_bytes: int
    #: Parameters while the model is loaded and sharded.
    loading_bytes: int
    #: fp32 copies of the adapters.
    master_bytes: int = 0
    #: Host memory.
    host_bytes: int = 0
    #: All-gathered parameters at the start of the forward pass, before anything is saved for the backward pass.
    starting_bytes: int = 0


def shard(run: DryRun, units: Units, settings: Settings) -> DryRun:
    """Turn the dry run of one GPU into one rank's allocations. `host_bytes` becomes the sum over a machine's local ranks."""
    launch = settings.launch
    sharded = (_fsdp if launch.strategy == "fsdp" else _deepspeed)(units, settings)
    frozen_bytes, trained_bytes = _totals(_by_unit(units))
    resident_frozen_bytes, resident_trained_bytes = sharded.resident_bytes
    # the dry run is the same for every strategy: subtract the other ranks' shards, add gathered parameters and buffers
    parts = dict(run.parts)
    parts["weights"] += resident_frozen_bytes - frozen_bytes
    parts["adapters"] += resident_trained_bytes - trained_bytes
    parts["optimizer"] = math.ceil(run.parts["optimizer"] * sharded.optimizer_share) + sharded.master_bytes
    # the parts that are empty when the forward pass starts
    step_bytes = sum(run.parts[name] for name in ("activations", "recomputed", "loss", "workspace"))
    parts["gathered"] = max(sharded.gathered_bytes, sharded.starting_bytes - step_bytes)
    # each phase's peak falls by the same bytes
    saved_bytes = run.allocated_bytes - sum(parts.values())
    peaks = {phase: size - saved_bytes if size else 0 for phase, size in run.peaks.items()}
    if peaks["eval"]:  # an evaluation may save less for later than a step does, so its start may be the peak
        model_bytes = sum(parts[name] for name in ("weights", "adapters", "optimizer"))
        peaks["eval"] = max(peaks["eval"], sharded.starting_bytes + model_bytes)
    if loads_own_rows(settings):
        # quantisation states of 4-bit weights are no parameters, so they are not sharded
        state_bytes = run.parts["weights"] - frozen_bytes
        peaks["load"] = sharded.loading_bytes + state_bytes
    else:
        peaks["load"] = max(run.peaks["load"], sharded.loading_bytes)
    local_ranks = launch.num_processes // launch.num_machines
    name = f"ZeRO-{launch.zero_stage}" if launch.strategy == "deepspeed" else "FSDP"
    offload = "" if launch.offload == "none" else f" with offload to {launch.offload}"
    note = f"memory on each of {launch.num_processes} GPUs under {name}{offload} is by rule, not measured on several GPUs"
    return dataclasses.replace(
        run, parts=parts, peaks=peaks,
        host_bytes=local_ranks * (run.host_bytes + sharded.host_bytes), notes=(*run.notes, note),
    )  # fmt: skip


# Where the moment of a peak is uncertain, the higher figure counts. tests/standin/test_ranks_peaks.py compares these rules with
# torch's allocator on stand-in GPUs; none was measured on real GPUs.
def _fsdp(units: Units, settings: Settings) -> Sharded:
    cards, own_rows = settings.launch.num_processes, loads_own_rows(settings)
    # Each rank keeps ceil(rows / world size) rows of every parameter, padded. The quantisation states of 4-bit weights are no
    # parameters and are not sharded (torch/distributed/fsdp/_fully_shard/_fsdp_param.py, FSDPParam._init_sharded_param).
    shards = _by_unit(units, lambda parameter: _bytes_by_row(parameter, cards))
    parameters = list(itertools.chain(*units.values()))
    # Gradients stay whole until the last micro-batch (no_sync), then are reduce-scattered through buffers of two units
    # (accelerate/accelerator.py, Accelerator.no_sync; _fsdp_param_group.py, FSDPParamGroup.post_backward).
    reducing_bytes = 2 * max(cards * trained for _, trained in shards.values())
    starting_bytes, gathered_bytes = _gathered_by_fsdp(units, cards)
    gathered_bytes += reducing_bytes
    # Of 4-bit weights a rank loads its own rows (finetune/model/build.py), beside one 16-bit matrix and its codes at a time.
    # Otherwise each rank loads the full model. accelerate keeps the unsharded parameters until all are sharded
    # (accelerate/utils/fsdp_utils.py, fsdp2_prepare_model, original_sd).
    all_frozen_bytes, all_trained_bytes = _totals(_by_unit(units))
    unsharded_bytes = all_trained_bytes + (0 if own_rows else all_frozen_bytes)
    # Codes are stored as one column, a 16-bit element for 4 codes: the 16-bit matrix takes 4 times the bytes of its codes.
    codes_bytes = [p.size_bytes for p in parameters if p.row_bytes == p.item_bytes and not p.trained]
    quantising_bytes = 5 * max(codes_bytes, default=0) if own_rows else 0
    frozen_bytes, trained_bytes = _totals(shards)
    if settings.launch.offload == "none":
        # Optimizer states follow the shards (torch/optim/adamw.py on the DTensors of FSDPParam.sharded_param).
        loading_bytes = frozen_bytes + max(unsharded_bytes + trained_bytes, quantising_bytes)
        full_trained_bytes = sum(parameter.size_bytes for parameter in parameters if parameter.trained)
        optimizer_share = min(1.0, trained_bytes / max(1, full_trained_bytes))
        resident_bytes = frozen_bytes, trained_bytes
        return Sharded(resident_bytes, optimizer_share, gathered_bytes, loading_bytes, starting_bytes=starting_bytes)
    # With offload, shards, their gradients and AdamW's two states are in pinned memory; the shards of two units are on the card
    # at a time (_fsdp_param.py, FSDPParam.all_gather_inputs).
    host_bytes = sum(pinned_bytes(_bytes_by_row(parameter, cards)) for parameter in parameters) + 3 * trained_bytes
    arriving_bytes = 2 * max(map(sum, shards.values()))
    loading_bytes = max(unsharded_bytes + (trained_bytes if own_rows else 0), quantising_bytes)
    return Sharded(
        (0, 0), 0.0, gathered_bytes + arriving_bytes, loading_bytes,
        host_bytes=host_bytes, starting_bytes=starting_bytes + arriving_bytes,
    )  # fmt: skip


def _gathered_by_fsdp(units: Units, cards: int) -> tuple[int, int]:
    """Return a GPU's bytes of all-gathered parameters at the start of the forward pass and at the peak."""
    # torch/distributed/fsdp/_fully_shard/_fsdp_param_group.py, FSDPParamGroup.wait_for_unshard;
    # accelerate/utils/fsdp_utils.py, fsdp2_prepare_model
    full = {name: sum(rounded(cards * _bytes_by_row(parameter, cards)) for parameter in unit) for name, unit in units.items()}
    layer = max((size for name, size in full.items() if name.startswith("layers.")), default=0)
    embedding, head, others = (full.get(name, 0) for name in (EMBEDDING, HEAD, REST))
    # The output layer and the other parameters stay gathered from forward to backward, an embedding tied to the output layer
    # from the start. At the peak: a unit, its all-gather buffer and the next unit's buffer. Two exist at a time; the third
    # counts because buffers belong to another stream, whose blocks the first stream can't reuse.
    starting = 2 * (embedding or head) + layer  # the embedding, its buffer, and the first layer's
    tied = head if not embedding else 0
    in_layers, at_loss = tied + 3 * layer, layer + (head if tied else 2 * head)
    in_backward = head + layer + max(layer, embedding)
    return starting + 2 * others, max(in_layers, at_loss, in_backward) + 2 * others


def _deepspeed(units: Units, settings: Settings) -> Sharded:
    launch, item_bytes = settings.launch, 4 if settings.dtype == "float32" else 2
    ends = [parameter for name in (EMBEDDING, HEAD) for parameter in units.get(name, ())]
    hidden = max(parameter.row_bytes // parameter.item_bytes for parameter in ends)
    cards, offloads = launch.num_processes, launch.offload != "none"
    full_bytes = _by_unit(units)
    weight_bytes, adapter_bytes = _totals(full_bytes)
    all_bytes = weight_bytes + adapter_bytes
    # ZeRO-2 shards the optimizer states and fp32 master copies of the adapters, not weights and adapters
    # (deepspeed/runtime/zero/stage_1_and_2.py, DeepSpeedZeroOptimizer). Offload moves them to host memory (offload_config.py).
    rank_adapter_bytes = -(-adapter_bytes // cards)  # one rank's adapters in fp32: master copy, gradient of the step
    optimizer_share, master_bytes = (0.0, 0) if offloads else (1 / cards, rank_adapter_bytes)
    host_bytes = 4 * rank_adapter_bytes if offloads else 0  # master copy, gradient, two states of AdamW
    # Gradients count as whole, with two buffers of hidden x hidden elements (reduce_bucket_size, overlap_comm;
    # stage_1_and_2.py, reduce_independent_p_g_buckets_and_remove_grads; stage3.py).
    buffer_bytes = 2 * hidden * hidden * item_bytes + (0 if offloads else rank_adapter_bytes)
    if launch.zero_stage == 2:
        return Sharded((weight_bytes, adapter_bytes), optimizer_share, buffer_bytes, all_bytes, master_bytes, host_bytes)
    # ZeRO-3: each rank keeps ceil(elements / world size) of every parameter (partition_parameters.py, Init._partition_param).
    shards = _by_unit(units, lambda parameter: _bytes_by_element(parameter, cards))
    parameters = list(itertools.chain(*units.values()))
    # Parameters of fewer than 10 x hidden elements are never sharded (stage3_param_persistence_threshold;
    # transformers/integrations/deepspeed.py, trainer_config_finalize).
    persistent_bytes = sum(rounded(p.size_bytes) for p in parameters if p.size_bytes < 10 * hidden * p.item_bytes)
    # Gathered: up to MAX_LIVE_ELEMENTS, and the elements being fetched (stage3_prefetch_bucket_size;
    # partitioned_param_coordinator.py, PartitionedParameterCoordinator).
    fetched_bytes = max(map(sum, full_bytes.values())) + round(0.9 * hidden * hidden) * item_bytes
    gathered_bytes = min(all_bytes, persistent_bytes + MAX_LIVE_ELEMENTS * item_bytes + fetched_bytes) + buffer_bytes
    if not offloads:
        # Each rank loads the full model and keeps its shards beside it until all is sharded: zero3_init_flag is off, and
        # transformers excludes quantised models from that flag (finetune/distributed.py,
        # accelerate_configuration; transformers/modeling_utils.py, PreTrainedModel.get_init_context).
        shard_bytes = _totals(shards)
        return Sharded(shard_bytes, optimizer_share, gathered_bytes, all_bytes + sum(shard_bytes), master_bytes, host_bytes)
    # Offloaded parameters are in pinned memory, or on a drive behind buffers in host memory (offload_config.py).
    arriving_bytes = 2 * max(map(sum, shards.values()))
    host_bytes += sum(pinned_bytes(_bytes_by_element(parameter, cards)) for parameter in parameters)
    host_bytes += NVME_BUFFER_ELEMENTS * item_bytes if launch.offload == "nvme" else 0
    return Sharded((0, 0), optimizer_share, gathered_bytes + arriving_bytes, all_bytes, master_bytes, host_bytes)


def _by_unit(units: Units, size: Callable[[Parameter], int] = attrgetter("size_bytes")) -> dict[str, tuple[int, int]]:
    sums = {name: [0, 0] for name in units}
    for name, parameters in units.items():
        for parameter in parameters:
            sums[name][parameter.trained] += rounded(size(parameter))
    return {name: (frozen, trained) for name, (frozen, trained) in sums.items()}


def _totals(unit_bytes: dict[str, tuple[int, int]]) -> tuple[int, int]:
    return sum(frozen for frozen, _ in unit_bytes.values()), sum(trained for _, trained in unit_bytes.values())


# Bytes of the largest shard, whole rows or whole elements each.
def _bytes_by_row(parameter: Parameter, cards: int) -> int:
    return -(-parameter.rows // cards) * parameter.row_bytes


def _bytes_by_element(parameter: Parameter, cards: int) -> int:
    return -(-parameter.size_bytes // parameter.item_bytes // cards) * parameter.item_bytes


def units_of(config: dict[str, Any], settings: Settings) -> Units:
    """Return the units of a model with adapters, cached. Raises RecipeError for a model that can't be built."""
    deciding_settings = {name: getattr(settings, name) for name in settings_that_decide(Decides.PARAMETERS)}
    deciding_settings["shards_weights"] = settings.launch.shards_weights  # 4-bit weights are then stored in another dtype
    key = cache.key_of(kind="units", config=config, settings=deciding_settings)
    return cache.cached(key, Units, lambda: _full_units(config, settings))


def _full_units(config_values: dict[str, Any], settings: Settings) -> Units:
    from finetune.memory.depth import at_depth, inspect_layers, plan_depth
    from finetune.model.transformers_config import config_from

    config = config_from(config_values, settings)
    depth = plan_depth(inspect_layers(config)[0])
    shallow_units = _units_of_model(at_depth(config, depth.run), settings)
    # layers repeat, so a shallow model shows the units of all
    layers = {f"layers.{index}": shallow_units[f"layers.{depth.shallow_index(index)}"] for index in range(depth.full)}
    return layers | {name: shallow_units[name] for name in (EMBEDDING, HEAD, REST) if name in shallow_units}


def _units_of_model(config: Any, settings: Settings) -> Units:
    from finetune.compat.bitsandbytes import own_quantisation_maps
    from finetune.compat.torch import fake_tensor_mode
    from finetune.memory.fake_model import fake_dora_weights, layer_number, materialise
    from finetune.memory.tracker import StorageTracker
    from finetune.model.adapters import attach_adapters
    from finetune.model.build import build_base, model_dtype

    with fake_dora_weights():
        model = attach_adapters(build_base(settings, config, device="cpu", weights=False), settings)
        with own_quantisation_maps(), fake_tensor_mode():
            materialise(model, StorageTracker({}), dtype=model_dtype(settings))
    base: Any = model.get_base_model()
    unit_of = {id(base.get_input_embeddings().weight): EMBEDDING}
    if base.get_output_embeddings() is not None:
        # overwrites a tied embedding, which belongs to the output layer
        unit_of[id(base.get_output_embeddings().weight)] = HEAD
    by_unit: dict[str, list[Parameter]] = {}
    for name, parameter in model.named_parameters():
        layer, rows = layer_number(name), parameter.shape[0] if parameter.dim() else 1
        unit = unit_of.get(id(parameter), REST) if layer is None else f"layers.{layer}"
        size = parameter.numel() * parameter.element_size()
        by_unit.setdefault(unit, []).append(
            Parameter(rows, size // max(1, rows), parameter.element_size(), parameter.requires_grad)
        )
    return {name: tuple(parameters) for name, parameters in by_unit.items()}
