"""Speed model: step time from FLOPs, bytes moved and dequantisation at the GPU's rates."""

from __future__ import annotations

import math
import operator
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field, fields, replace
from itertools import accumulate
from typing import TYPE_CHECKING, Any

from finetune.planner.plan import DataStatistics, LayerCopies
from finetune.planner.shape import DELTA_NET, MAMBA2, ModelShape
from finetune.settings.base_formats import BaseFormat
from finetune.settings.compatibility import BUFFERS
from finetune.settings.methods import METHODS, Method
from finetune.settings.optimizers import OPTIMIZERS

if TYPE_CHECKING:
    from finetune.card.card import Card
    from finetune.memory.forecast import Forecast
    from finetune.planner.strategy import Strategy

# Constants that are not arithmetic are estimates for torch's eager kernels on an RTX 4090; cards.json has the share of its
# published rates that a GPU reaches. `benchmarks/speed_accuracy.py` compares the model with 60 published measurements
# (docs/accuracy.md); earlier runs on a GPU correct it (history.py). Nothing here decides whether a plan fits.

#: Lengths of rows that stand for all rows in the expected width of sorted micro-batches.
_QUANTILES = 200


def _probability_longest_below(share: float, rows: int, batch: int) -> float:
    # mean probability that a micro-batch's longest row is among the shortest `share` of all rows, where the `batch` rows of a
    # step are sorted and cut into micro-batches of `rows`
    if rows == batch or share >= 1:
        return share**rows
    if rows == 1:
        return share
    expected_micro_batches = 0.0
    for n_short in range(rows, batch + 1):
        # binomial probability that `n_short` of the rows are short: they fill the first n_short // rows micro-batches
        log_ways = math.lgamma(batch + 1) - math.lgamma(n_short + 1) - math.lgamma(batch - n_short + 1)
        probability = math.exp(log_ways + n_short * math.log(share) + (batch - n_short) * math.log1p(-share))
        expected_micro_batches += probability * (n_short // rows)
    return expected_micro_batches * rows / batch


@dataclass(frozen=True)
class Batches:
    """Widths of micro-batches in tokens; without data, max_length."""

    max_length: int
    packed: bool
    data: DataStatistics | None
    _widths: dict[tuple[int, int | None], float] = field(default_factory=dict, compare=False, repr=False)

    @property
    def lengths(self) -> tuple[int, ...]:
        return self.data.lengths if self.data else ()

    @property
    def longest(self) -> int:
        return self.max_length if self.packed or not self.lengths else min(self.lengths[-1], self.max_length)

    def mean_width(self, rows: int, batch: int | None = None) -> float:
        """Return the mean padded width of a micro-batch, in a step of `batch` rows sorted by length."""
        if self.packed or not self.lengths:
            return float(self.max_length)
        if (rows, batch) in self._widths:  # hundreds of strategies share a few widths
            return self._widths[rows, batch]
        count = len(self.lengths)
        stride = 1 if rows == 1 or batch in (None, rows) else max(1, count // _QUANTILES)
        # numbers of rows up to each length's last row, or up to each quantile
        ends = accumulate(Counter(self.lengths).values()) if stride == 1 else (*range(stride, count, stride), count)
        width, probability_before = 0.0, 0.0
        for n_rows in ends:
            probability = _probability_longest_below(n_rows / count, rows, batch or rows)
            width += min(self.lengths[n_rows - 1], self.max_length) * (probability - probability_before)
            probability_before = probability
        self._widths[rows, batch] = width
        return width

    @property
    def tokens_per_row(self) -> float:
        """Mean tokens of a row without padding."""
        return self.mean_width(1)

    @property
    def trained_share(self) -> float:
        return self.data.trained_tokens / self.data.total_tokens if self.data and self.data.total_tokens else 1.0


#: Bytes moved between matrix products, per input and output element of a linear layer: 100 of the 130 us a token of an 8B
#: model on a 4090 without recomputation, and 30 more when every layer is recomputed. Compiled layers move about a third.
ELEMENTWISE_BYTES, ELEMENTWISE_RECOMPUTED_BYTES, COMPILED_SHARE = 39.0, 11.0, 0.35
#: Bytes moved by eager attention for each element of its scores, forward and backward: product, scaling, mask, softmax in fp32
#: and the cast back, each read and written. Other attention kernels keep no scores.
SCORE_BYTES, SCORE_BACKWARD_BYTES = 24, 28
#: Bytes moved besides the grouped products, for each hidden element of an expert's row. Forward: gathered by expert, scaled
#: by its score, put back in the tokens' order and added up, each read and written in 16 bit; backward: gradients gathered, put
#: back and added up. `SCORED_BYTES`: softmax and top-k in fp32, for each expert and token.
ROUTED_BYTES, ROUTED_BACKWARD_BYTES, SCORED_BYTES = 15, 11, 32
#: Rows of a tile of a grouped product (CUTLASS, aten/src/ATen/native/cuda/GroupMM.cu): half of an expert's last is empty.
GROUPED_TILE_ROWS = 128
#: Host time of a layer relative to a dense layer with sdpa, by kernels: with experts (benchmarks/layer_kernels.py), and with
#: eager attention, which launches about 14 more than the 237 of an ordinary layer.
EXPERTS_DISPATCH, EAGER_DISPATCH = 1.3, 1.06
#: fp32 elements that a gated delta net's rule allocates for a token, forward and backward, per value head and mean head size:
#: in torch (its profiler, transformers 5.23), with fla 0.6.0 (274 and 460 KiB for a block of Qwen3.5-4B on the stand-in GPU,
#: less 202 and 332 of its other parts, which `ELEMENTWISE_BYTES` covers). Each is written once and read about once.
DELTA_RULE, FUSED_DELTA_RULE, DELTA_CHUNK = (36.3, 57.0), (4.5, 8.0), 64
#: In torch's backward pass each chunk allocates gradients as large as the whole tensors: per value head, three of a key's
#: width, two of a value's and one of a chunk's. 88 KiB per token and chunk for the 4B, confirmed on the stand-in GPU.
DELTA_CHUNK_GRADIENTS = (3, 2, 1)
#: fp32 elements that the Mamba-2 scan in torch allocates for a token, forward and backward, per head, for each element of a
#: head, of its state and of a chunk (the profiler at seven sizes). With mamba-ssm a mixer saves as much as an ordinary layer
#: (49 MiB instead of 1,046), so nothing is added.
SCAN = ((15.5, 10.5, 5.0), (15.5, 12.4, 8.0))
#: Kernels of the rule in torch, forward and backward, and of each chunk: 1,632 for a block of 2,048 tokens on the stand-in GPU,
#: 93 with fla. Scan: operators that allocate or write. `LAYER_KERNELS`: an ordinary layer (docs/stand-in-gpu.md).
DELTA_KERNELS, DELTA_CHUNK_KERNELS, SCAN_KERNELS, LAYER_KERNELS = (86, 141), (9, 32), (63, 80), 237
#: Bytes saved for the backward pass, per hidden element, layer and token, by ordinary layers (dry run of Llama-3.1-8B).
SAVED_BYTES = 45.4
#: Host seconds of a decoder layer's forward pass with adapters (a backward pass takes two), and a recomputation in such passes:
#: ordinary, lean and compiled layers on a GPU (NF4; benchmarks/host_time.py), and on a CPU.
DISPATCH, LEAN_DISPATCH, COMPILED_DISPATCH, CPU_DISPATCH = (1.8e-3, 2.7), (1.5e-3, 1.6), (1.0e-3, 0.9), (1.05e-3, 1.0)
#: Host seconds of a torch operator on the machines that measured DISPATCH, which scales with `Card.launch_s`. On a GPU 2.5 us
#: on the stand-in, whose driver does nothing, and 2 us assumed for a driver's launch.
LAUNCH_S, CPU_LAUNCH_S = 4.5e-6, 2.6e-6
#: Host time of selective checkpointing, which decides in Python for each operator whether to save, relative to plain
#: recomputation (1.65 and 1.73 measured on a CPU with layers too small for computation to count).
SELECTIVE_DISPATCH = 1.7
#: Share of a GPU's fp32 rate that a step's large products reach (benchmarks/speed_accuracy.py).
FP32_SHARE = 0.6
#: Assumed where the GPU's rates are unknown, only to order strategies; no time is reported.
ASSUMED_FLOPS, ASSUMED_BANDWIDTH, ASSUMED_PCIE = 50e12, 500e9, 12e9
#: Assumed read rate of a drive: a common NVMe drive on PCIe 3 x4 reads 3.5 GB/s (published).
ASSUMED_DRIVE = 3e9
#: Assumed for a CPU, which does not compute while it launches (the bundled model in fp32 on one core: 0.2 ms per token and
#: 16 ms per micro-batch).
CPU_FLOPS, CPU_BANDWIDTH = 60e9, 20e9


@dataclass(frozen=True)
class Job:
    """Figures shared by all strategies of a recipe: `batch` rows per step on `world` GPUs."""

    shape: ModelShape
    card: Card
    batches: Batches
    batch: int
    world: int
    rank: int
    float32: bool = False
    compiled: bool = False
    lean: bool = False
    drive_bytes_s: float = ASSUMED_DRIVE
    method: Method = METHODS["sft"]
    attention: str = "sdpa"
    #: Kernels of a package compute delta rules and scans, not torch.
    fused_mixers: bool = True

    @property
    def width(self) -> int:
        """Tokens of the longest row, or `max_length` where rows are packed or unknown."""
        return self.batches.longest

    def micro_batch_tokens(self, strategy: Strategy, width: float) -> float:
        return self.method.sequences * strategy.micro * width


@dataclass(frozen=True)
class Timing:
    """Seconds of an optimizer step. `tokens_per_s` excludes padding."""

    step_s: float
    tokens_per_s: float
    parts: dict[str, float]
    copies: LayerCopies | None = None

    def corrected(self, factor: float | None) -> tuple[float | None, float | None]:
        """Return the step's seconds times `factor`, and its tokens per second; None where the factor is unknown."""
        return (self.step_s * factor, self.tokens_per_s / factor) if factor else (None, None)


def knows_rates(card: Card) -> bool:
    """Tell whether a GPU's rates are known; else times only order strategies."""
    return bool(card.bf16_flops and card.bandwidth_bytes_s and not card.is_cpu)  # a CPU's small products don't reach its rates


def saved_bytes(base: BaseFormat, lean: bool) -> float:
    """Return a layer's saved bytes per hidden element and token."""
    return base.lean_saved_bytes if lean else SAVED_BYTES


def time_step(job: Job, strategy: Strategy) -> Timing:
    """Time one optimizer step, before correction by measured runs."""
    shape, card, batches = job.shape, job.card, job.batches
    unfused_share = COMPILED_SHARE if job.compiled else 1.0
    assumed_flops, assumed_bandwidth = (CPU_FLOPS, CPU_BANDWIDTH) if card.is_cpu else (ASSUMED_FLOPS, ASSUMED_BANDWIDTH)
    flops = (card.bf16_flops or assumed_flops) * card.flops_share
    bandwidth = (card.bandwidth_bytes_s or assumed_bandwidth) * card.bandwidth_share
    pcie = card.pcie_bytes_s or ASSUMED_PCIE
    mixer_bandwidth = bandwidth  # rules and scans compute in fp32 in every dtype
    if job.float32 and card.fp32_flops:  # no tensor cores, and twice the bytes
        flops, bandwidth, pcie = card.fp32_flops * FP32_SHARE, bandwidth / 2, pcie / 2
    width = batches.mean_width(strategy.micro, job.batch // job.world)
    tokens = job.micro_batch_tokens(strategy, width)
    recomputed_share = strategy.recomputed_layers(shape.layers) / shape.layers
    references = job.method.reference_passes  # forward passes without gradients
    passes = 2 + recomputed_share + references
    repeated = recomputed_share + references  # forward passes beyond the first
    attention_flops = flops if job.float32 else card.attention_flops or flops
    used_share = shape.used_share(tokens)
    score_bytes = (SCORE_BYTES * (1 + repeated) + SCORE_BACKWARD_BYTES) * shape.attended * shape.heads * (tokens * width)
    mixer_bytes, mixer_kernels = _mixer_work(job, width, repeated)
    moved = ELEMENTWISE_BYTES + ELEMENTWISE_RECOMPUTED_BYTES * repeated + strategy.base.product_bytes * (1 + repeated)
    dequantised = shape.quantisable(strategy.base) - (1 - used_share) * (shape.expert_4bit if strategy.base.experts else 0)
    micro_s = {  # seconds of a micro-batch
        "matmul": max(
            _layer_flops(job, recomputed_share, tokens) / flops
            + _attention_flops(job, strategy, tokens, width) / attention_flops,
            passes * 2 * (shape.linear + shape.expert * used_share) / bandwidth,  # few tokens: reading the weights takes longer
        ),
        "loss": (6 + 2 * references) * shape.head * tokens * batches.trained_share * (batches.tokens_per_row / width) / flops,
        "elementwise": moved * shape.layer_width * shape.layers * tokens * unfused_share / bandwidth,
        "scores": score_bytes * unfused_share / bandwidth if job.attention == "eager" else 0.0,
        "mixers": mixer_bytes * tokens / mixer_bandwidth,
        "routing": _routed_bytes(shape, tokens, repeated) * unfused_share / bandwidth,
        "dequantisation": passes * dequantised * strategy.base.dequantise_bytes / bandwidth,
        "transfer": 2 * 2 * shape.hidden * shape.layers * tokens / pcie if strategy.checkpointing == "offload" else 0.0,
    }
    if strategy.host_table:
        micro_s["transfer"] += 2 * shape.hidden * tokens / pcie
    host_s = _host_s(job, strategy, mixer_kernels)
    # a GPU computes while the host launches
    micro_s["launching"] = host_s * unfused_share if card.is_cpu else max(0.0, host_s - sum(micro_s.values()))
    micro_batches = job.batch // (job.world * strategy.micro)
    parts, copies = {name: seconds * micro_batches for name, seconds in micro_s.items()}, None
    if strategy.offloaded:
        copies = _layer_copies(job, strategy, micro_batches, sum(micro_s.values()) - micro_s["loss"], passes)
        parts["transfer"] += copies.waiting_s or 0.0
    parts["optimizer"] = _optimizer_s(strategy.optim, job.shape, job.rank, bandwidth, pcie)
    step_s = sum(parts.values())
    return Timing(step_s, job.batch * job.method.sequences * batches.tokens_per_row / step_s, parts, copies)


def _host_s(job: Job, strategy: Strategy, mixer_kernels: float) -> float:
    layers, is_cpu, references = job.shape.layers, job.card.is_cpu, job.method.reference_passes
    factor = SELECTIVE_DISPATCH if strategy.checkpointing == "selective" else 1.0
    factor *= (EXPERTS_DISPATCH if job.shape.experts else 1.0) * (EAGER_DISPATCH if job.attention == "eager" else 1.0)
    gpu_dispatch = COMPILED_DISPATCH if job.compiled else LEAN_DISPATCH if job.lean else DISPATCH
    layer_s, recomputing = CPU_DISPATCH if is_cpu else gpu_dispatch
    passes = 3 + references + recomputing * (strategy.recomputed_layers(layers) / layers)
    seconds = factor * (passes * layers * layer_s)
    seconds += mixer_kernels * 3 * (CPU_DISPATCH if is_cpu else DISPATCH)[0] / LAYER_KERNELS
    measured_launch_s = job.card.launch_s
    return seconds * (measured_launch_s / (CPU_LAUNCH_S if is_cpu else LAUNCH_S)) if measured_launch_s else seconds


def _layer_flops(job: Job, recomputed_share: float, tokens: float) -> float:
    shape = job.shape
    # FLOPs per weight and token: frozen layers 4 (no weight gradient), recomputed 6, adapters 6 and 8, a reference pass 2
    # without adapters
    frozen = 4 + 2 * recomputed_share + 2 * job.method.reference_passes
    flops_per_token = frozen * shape.computed + (6 + 2 * recomputed_share) * job.rank * shape.adapter_per_rank
    empty_rows = shape.used_share(tokens) * shape.experts * GROUPED_TILE_ROWS / 2
    return flops_per_token * tokens + frozen * (empty_rows * shape.layers * 3 * shape.hidden * shape.expert_inner)


def _attention_flops(job: Job, strategy: Strategy, tokens: float, width: float) -> float:
    shape, data, attended = job.shape, job.batches.data, width
    if job.batches.packed and data and data.lengths:  # mean tokens that a token of a packed row attends over
        attended = sum(length * length for length in data.lengths) / max(1, data.total_tokens)
    recomputed = 0.0 if strategy.checkpointing == "selective" else strategy.recomputed_layers(shape.layers) / shape.layers
    # causal attention: 2 x layers x width of the heads x attended tokens per token forward, and 2.5 times as many backward
    passes = 1 + 2.5 + recomputed + job.method.reference_passes

    def flops(layers: int, tokens_attended: float) -> float:
        return 2 * layers * shape.attention_width * tokens_attended * passes * tokens

    return flops(shape.attended - shape.windowed, attended) + flops(shape.windowed, _attended_in_window(job, attended))


def _attended_in_window(job: Job, attended: float) -> float:
    window = job.shape.window
    if attended < window or job.attention == "eager":  # eager attention computes all scores in every layer
        return attended
    if job.attention != "sdpa":
        return window * (2 - window / attended)
    # For sdpa a window is a mask, and torch's kernel skips hidden keys only if it is told `is_causal`
    # (transformers/masking_utils.py: _ignore_causal_mask_sdpa; mem_eff_attention/kernel_forward.h of torch: num_keys).
    return 2 * attended


def _mixer_work(job: Job, width: float, repeated_passes: float) -> tuple[float, float]:
    # bytes moved per token, and kernels per micro-batch, by the rules or scans of all mixers; `elements`: fp32 elements per
    # token, and `kernels`, each (forward, backward)
    sizes, mixers = job.shape.mixer, job.shape.mixers
    if not sizes or (job.fused_mixers and MAMBA2[-1] in sizes):
        return 0.0, 0.0
    if MAMBA2[-1] in sizes:
        heads, *widths = (sizes[name] for name in MAMBA2)
        elements = [heads * sum(map(operator.mul, factors, widths)) for factors in SCAN]
        kernels: Sequence[float] = SCAN_KERNELS
    else:
        heads, key, value = (sizes[name] for name in DELTA_NET)
        elements = [share * heads * (key + value) / 2 for share in (FUSED_DELTA_RULE if job.fused_mixers else DELTA_RULE)]
        kernels = (0, 0)
        if not job.fused_mixers:
            chunks = math.ceil(width / DELTA_CHUNK)
            elements[1] += chunks * heads * sum(map(operator.mul, DELTA_CHUNK_GRADIENTS, (key, value, DELTA_CHUNK)))
            kernels = [rule + chunks * chunk for rule, chunk in zip(DELTA_KERNELS, DELTA_CHUNK_KERNELS, strict=True)]
    elements_per_token, launched = (forward * (1 + repeated_passes) + backward for forward, backward in (elements, kernels))
    return 2 * 4 * mixers * elements_per_token, mixers * launched  # fp32, written and read


def _routed_bytes(shape: ModelShape, tokens: float, repeated_passes: float) -> float:
    bytes_per_element = ROUTED_BYTES * (1 + repeated_passes) + ROUTED_BACKWARD_BYTES
    score_bytes = SCORED_BYTES * shape.experts * (2 + repeated_passes)
    return shape.layers * tokens * (bytes_per_element * shape.experts_used * shape.hidden + score_bytes)


def _layer_copies(job: Job, strategy: Strategy, micro_batches: int, layers_s: float, passes: float) -> LayerCopies:
    # offloaded layers are spread evenly: a fetch overlaps with the layers after the previous offloaded layer
    fetched = max(0, strategy.offloaded - BUFFERS)  # a pass starts with the previous pass's last layers in the buffers
    layer_bytes, rate = job.shape.layer_bytes(strategy.base), job.card.pcie_bytes_s or ASSUMED_PCIE
    if strategy.offload_target == "nvme":
        rate = min(rate, job.drive_bytes_s)
    computing_s = micro_batches * layers_s * fetched / strategy.offloaded
    forward_s, backward_s = computing_s / passes, computing_s * (1 - 1 / passes)  # one pass is forward
    moved_bytes = 2 * micro_batches * fetched * layer_bytes
    copying_s = moved_bytes / 2 / rate  # the forward and the backward pass each move half
    return LayerCopies(
        place=str(strategy.offload_target), layers=strategy.offloaded, of_layers=job.shape.layers, pinned_bytes=0,
        weight_bytes=strategy.offloaded * layer_bytes, moved_bytes_per_step=moved_bytes, copied_bytes_per_s=rate,
        forward_computing_s=forward_s, forward_copying_s=copying_s, backward_computing_s=backward_s,
        backward_copying_s=copying_s, waiting_s=max(0.0, copying_s - forward_s) + max(0.0, copying_s - backward_s),
    )  # fmt: skip


def layer_copies_of(timing: Timing, forecast: Forecast, card: Card) -> LayerCopies | None:
    """Return the plan's copies of offloaded layers."""
    if timing.copies is None:
        return None
    copies = replace(timing.copies, pinned_bytes=forecast.pinned_bytes)
    if knows_rates(card):
        return copies
    unknown_seconds: dict[str, Any] = {field.name: None for field in fields(copies) if field.default is None}
    return replace(copies, **unknown_seconds)


def _optimizer_s(optim: str, shape: ModelShape, rank: int, bandwidth: float, pcie: float) -> float:
    optimizer, parameters, tensors = OPTIMIZERS[optim], rank * shape.adapter_per_rank, 2 * shape.adapters
    moving_s = optimizer.memory_bytes * parameters / bandwidth + optimizer.pcie_bytes * parameters / pcie
    return moving_s + optimizer.tensor_s * tensors + optimizer.cpu_s * parameters
