"""Measure what quantising the base costs on held-out rows: one model at a time, in a process of its own.

`python -m finetune.evaluate.quantisation JOB.json` prints its progress as lines; the last one is the result as JSON.
"""

from __future__ import annotations

import contextlib
import gc
import json
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from finetune.errors import CommandError, FinetuneError
from finetune.evaluate.paired import difference
from finetune.files import read_json, sha256_of
from finetune.model.configuration import read_config
from finetune.model.prequantised import stored_quantisation, trainable_formats
from finetune.planner.quantisation_cost import FormatLoss, QuantisationCost, Sequences, cost_path, read_losses, write_losses
from finetune.planner.shape import shape_of
from finetune.privacy import keep_private
from finetune.run.card_queue import card_queue
from finetune.serialise import from_json
from finetune.settings import LaunchRecipe, Settings
from finetune.settings.base_formats import BITS_16, BITS_32, INT8, NF4, BaseFormat, base_format_of, switches

Progress = Callable[[str], None]
#: Of a file with MOST_ROWS long rows.
MOST_JOB_BYTES = 2**30
#: Weights that take more of the free memory than this leave their layers in host memory.
_RESIDENT_SHARE = 0.8


@dataclass(frozen=True)
class Job:
    """What is measured. `free_bytes`: of the GPU; None on a CPU. `cards`: GPUs that it is queued for. `adapter`: its folder."""

    settings: Settings
    sequences: Sequences
    free_bytes: int | None = None
    cards: tuple[str, ...] = ()
    adapter: Path | None = None

    @property
    def on_cpu(self) -> bool:
        """Whether it is measured on the CPU."""
        return self.free_bytes is None


def measure(job: Job, progress: Progress = lambda _: None) -> QuantisationCost:
    """The loss of the rows in the plain format, int8 and NF4. Formats measured before, also by a killed call, are not again.

    Raises CommandError for a checkpoint that is stored quantised, and without rows that have a trained token.
    """
    settings = job.settings
    _require_plain_weights(settings)
    tokens = [sum(label != -100 for label in labels[1:]) for labels in job.sequences.labels]
    if not any(tokens):
        raise CommandError("no held-out row has a trained token", "Set dataset.test_split_size=0.1, or dataset.eval_path=FILE.")
    files = sorted(job.adapter.glob("adapter_*")) if job.adapter else []
    path = cost_path(settings, job.sequences, on_cpu=job.on_cpu, adapter=[sha256_of(file) for file in files])
    plain = BITS_32 if settings.dtype == "float32" else BITS_16
    row_losses, left_out = read_losses(path), []
    for base_format in (plain, INT8, NF4):
        if base_format.label in row_losses:
            continue
        settings_of_format = _settings_of(job, base_format)
        if settings_of_format is None:
            left_out.append(f"{base_format.label} was not measured: it does not fit, and its layers can't be offloaded")
            continue
        progress(f"measuring {base_format.label}: loading")
        row_losses[base_format.label] = _row_losses(job, settings_of_format, base_format.label, progress)
        _keep(path, row_losses, None)
    cost = _cost_of(job, row_losses, tokens, tuple(left_out))
    _keep(path, row_losses, cost)
    return cost


def _keep(path: Path, row_losses: dict[str, list[float]], cost: QuantisationCost | None) -> None:
    with contextlib.suppress(OSError):  # without a cache it is measured again
        write_losses(path, row_losses, cost)


def _require_plain_weights(settings: Settings) -> None:
    stored = trainable_formats(stored_quantisation(read_config(settings), settings.model_name_or_path))
    if stored and BITS_16 not in stored:
        raise CommandError(
            f"{settings.model_name_or_path} is stored in {stored[0].label}: what that costs can't be measured on it",
            "Give the 16-bit model that it was made from.",
        )


def _settings_of(job: Job, base_format: BaseFormat) -> Settings | None:
    """Settings that load this format, with layers in host memory where they do not fit; None where that is not possible."""
    changes: dict[str, Any] = {
        **switches(base_format), "layer_offloading": False, "offloaded_layers": 0, "offload_embeddings": False,
        "torch_compile": False, "launch": LaunchRecipe(),
    }  # fmt: skip
    shape = shape_of(read_config(job.settings), job.settings)
    if job.free_bytes is not None and shape.weight_bytes(base_format) > _RESIDENT_SHARE * job.free_bytes:
        if base_format.not_offloaded:
            return None
        changes |= {"layer_offloading": "cpu", "offloaded_layers": shape.layers}
    return job.settings.model_copy(update=changes)


def _row_losses(job: Job, settings: Settings, label: str, progress: Progress) -> list[float]:
    """Mean loss of each row's trained tokens, the model loaded for it and freed again."""
    import torch

    from finetune.evaluate.answerer import load_model
    from finetune.evaluate.kv_cache import loss_batch_tokens, run_halving
    from finetune.evaluate.score import batches, losses

    device = "cpu" if job.on_cpu else "cuda"
    model = load_model(settings, job.adapter, device)
    ids, labels = job.sequences.ids, job.sequences.labels
    values = [0.0] * len(ids)

    def compute(batch: list[int]) -> None:
        entries = losses(model, [ids[row] for row in batch], [labels[row] for row in batch], device)
        for row, entry in zip(batch, entries, strict=True):
            values[row] = entry["loss"]

    finished = 0
    try:
        # int8 takes outlier columns of a whole batch in 16 bit: alone, a row's loss does not depend on its neighbours.
        # A CPU gains little by batches, and rounds 4-bit products of other widths otherwise.
        batch_tokens = 1 if job.on_cpu or base_format_of(settings) is INT8 else loss_batch_tokens(model)
        for batch in batches([len(row) for row in ids], batch_tokens):
            progress(f"measuring {label}: {finished:,} of {len(ids):,} rows")
            run_halving(batch, compute)
            finished += len(batch)
    finally:
        model = None
        gc.collect()
        if not job.on_cpu:
            torch.cuda.empty_cache()
    return values


def _cost_of(job: Job, row_losses: dict[str, list[float]], tokens: list[int], left_out: tuple[str, ...]) -> QuantisationCost:
    weights = [float(count) for count in tokens]
    total, (plain, *_) = sum(weights), row_losses.values()

    def entry(label: str, values: list[float]) -> FormatLoss:
        loss = sum(value * weight for value, weight in zip(values, weights, strict=True)) / total
        if values is plain or len(values) < 2:  # noqa: PLR2004 - an interval needs two rows
            return FormatLoss(label, loss)
        gap = difference(plain, values, weights)
        return FormatLoss(label, loss, gap.value, gap.low, gap.high)

    formats = tuple(entry(label, values) for label, values in row_losses.items())
    name = job.settings.model_name_or_path
    return QuantisationCost(name, len(tokens), sum(tokens), formats, job.adapter is not None, left_out)


def steps_to_win_back(cost: float, curve: list[tuple[int, float]]) -> int | None:
    """Optimizer steps after which a run's held-out loss had fallen by `cost`, between its evaluations by a straight line.

    `curve`: steps and losses, from the one before training. None where it never fell that far.
    """
    for (step, loss), (next_step, next_loss) in zip(curve, curve[1:], strict=False):
        if curve[0][1] - next_loss >= cost > 0:
            share = (loss - curve[0][1] + cost) / (loss - next_loss)
            return max(1, round(step + share * (next_step - step)))
    return None


@contextlib.contextmanager
def _turn(job: Job, path: Path, progress: Progress) -> Iterator[None]:
    """Waits for runs on the GPU, as a run would."""
    if job.on_cpu or not job.cards:
        yield
        return
    import time

    queue = card_queue(job.cards)
    queue.join(path)
    try:
        while ahead := queue.ahead():
            progress(f"waiting for the GPU: {ahead[-1]}")
            time.sleep(0.5)
        yield
    finally:
        queue.leave()


def main() -> int:
    """Entry point of the process."""
    keep_private()
    path = Path(sys.argv[1])

    def progress(message: str) -> None:
        sys.stdout.write(message + "\n")
        sys.stdout.flush()

    try:
        job = from_json(Job, read_json(path, dict, max_bytes=MOST_JOB_BYTES))
        with _turn(job, path, progress):
            cost = measure(job, progress)
    except FinetuneError as error:
        sys.stderr.write(json.dumps(error.as_json()) + "\n")
        return error.exit_code
    sys.stdout.write(json.dumps(cost.as_json()) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
