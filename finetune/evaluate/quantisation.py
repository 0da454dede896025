"""Measure the cost of a quantised base on held-out rows (`--measure-quantisation`, `eval --quantisation`)."""

from __future__ import annotations

import gc
import math
import os
import time
from collections.abc import Sequence
from dataclasses import dataclass
from multiprocessing import Pipe, get_context
from multiprocessing.connection import Connection
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from finetune.errors import CommandError, FinetuneError
from finetune.evaluate.results import difference
from finetune.files import to_json
from finetune.model.configuration import read_config, stored_quantisation, trainable_formats
from finetune.planner.plan import Plan, read_plan
from finetune.planner.shape import shape_of
from finetune.run.card import Queue, cards_of, visibility
from finetune.run.directory import RunDirectory
from finetune.settings import LaunchRecipe, Recipe, Settings
from finetune.settings.base_formats import BITS_16, BITS_32, INT8, NF4, switches
from finetune.system import keep_private, redirect_output
from finetune.units import Progress

if TYPE_CHECKING:
    from finetune.data.splits import LimitedSplit

#: Weights that take a larger share of the usable memory leave their layers in host memory.
_RESIDENT_SHARE = 0.8
#: Most held-out sequences to measure, evenly spaced: losses are paired, so few suffice.
MOST_ROWS = 1_000
#: Columns `input_ids` and `labels` (-100: not trained), each with a list per sequence.
Rows = dict[str, list[list[int]]]


@dataclass(frozen=True)
class FormatLoss:
    """Mean loss per trained token, in nats, with base weights in this format."""

    label: str
    loss: float
    #: Loss minus the plain format's, with its 95 % interval; None for the plain format, or fewer than two rows.
    cost: float | None = None
    cost_low: float | None = None
    cost_high: float | None = None

    @property
    def summary(self) -> str:
        """E.g. `NF4 costs 0.012 of loss (0.008 to 0.016)`."""
        if self.cost is None or self.cost_low is None or self.cost_high is None:
            return f"{self.label} has a loss of {self.loss:.4f}"
        # four decimals, or more if a small cost would have fewer than two significant digits
        digits = max(4, 1 - math.floor(math.log10(abs(self.cost)))) if self.cost else 4
        interval = f"95 % interval {self.cost_low:.{digits}f} to {self.cost_high:.{digits}f}"
        if self.cost_low <= 0 <= self.cost_high:
            return f"{self.label} can't be told from it ({self.cost:+.{digits}f} of loss, {interval})"
        if self.cost < 0:
            return f"{self.label} lowers the loss by {-self.cost:.{digits}f} ({interval})"
        return f"{self.label} costs {self.cost:.{digits}f} of loss ({interval})"


@dataclass(frozen=True)
class QuantisationCost:
    """Losses of a model on the same rows by format, the plain format first."""

    model: str
    rows: int
    #: Trained tokens of the rows.
    tokens: int
    #: Without int8 where int8 neither fits nor can be offloaded.
    formats: tuple[FormatLoss, ...]
    #: The model has a run's adapter.
    tuned: bool = False

    @property
    def sentence(self) -> str:
        plain, *quantised = self.formats
        model = "the tuned model" if self.tuned else "the base model"
        clauses = [f"on {self.rows:,} held-out rows {model} has a loss of {plain.loss:.4f} in {plain.label}"]
        clauses += [entry.summary for entry in quantised]
        if INT8.label not in (entry.label for entry in quantised):
            clauses.append("int8 was not measured: it does not fit, and its layers can't be offloaded")
        return "; ".join(clauses)

    def as_json(self) -> dict[str, Any]:
        return {**to_json(self), "sentence": self.sentence}


def held_out_rows(splits: Sequence[LimitedSplit]) -> Rows:
    """Return the held-out rows to measure, of preference pairs the chosen answers."""
    return chosen_rows(splits[1].table() if len(splits) > 1 else None)


def chosen_rows(table: Any) -> Rows:
    """Return at most MOST_ROWS rows of an Arrow table, evenly spaced; none without a table."""
    columns = ["input_ids", "labels"]
    if table is None:
        return {column: [] for column in columns}
    indices = np.linspace(0, len(table) - 1, min(len(table), MOST_ROWS)).round().astype(np.int64)
    return table.select(columns).take(indices).to_pydict()


def measure_recipe(recipe: Recipe, progress: Progress, *, force: bool) -> QuantisationCost:
    """Measure the base of a run as `prepare` makes it. Raise CommandError without held-out rows."""
    from finetune.run.prepare import prepare

    prepared = prepare(recipe, force=force, progress=progress)
    return measure_plan(prepared.plan, held_out_rows(prepared.data.splits), progress)


def measure_run(run: RunDirectory, progress: Progress) -> dict[str, QuantisationCost]:
    """Measure a run's base and tuned model on its held-out rows. Raise CommandError without rows."""
    from datasets import load_from_disk

    from finetune.evaluate.answerer import adapter_folder

    adapter = adapter_folder(run)
    plan, folder = read_plan(run.plan), run.data / "eval"
    rows = chosen_rows(load_from_disk(str(folder)).data.table if folder.is_dir() else None)
    return {"base": measure_plan(plan, rows, progress), "tuned": measure_plan(plan, rows, progress, adapter)}


def measure_plan(plan: Plan, rows: Rows, progress: Progress, adapter: Path | None = None) -> QuantisationCost:
    """Measure a plan's base model, or base and adapter. Raise CommandError without trained tokens."""
    if not any(label != -100 for labels in rows["labels"] for label in labels[1:]):
        problem = "no held-out row has a trained token" if rows["labels"] else "no rows are held out"
        raise CommandError(problem, "Set dataset.test_split_size=0.1, or dataset.eval_path=FILE.")
    receiver, sender = Pipe(duplex=False)  # in a process, whose memory is free again afterwards
    process = get_context("spawn").Process(target=_send_cost, args=(sender, cards_of(plan)[:1], plan, rows, adapter))
    process.start()
    sender.close()  # else a killed process would not end `recv`
    try:
        while isinstance(message := receiver.recv(), str):
            progress(message)
    except EOFError:
        raise FinetuneError("the measurement failed: its process was killed") from None
    except BaseException:
        process.terminate()
        raise
    process.join()
    if isinstance(message, FinetuneError):
        raise message
    return message


def _send_cost(sender: Connection, cards: tuple[str, ...], plan: Plan, rows: Rows, adapter: Path | None) -> None:
    # `cards` are the parent's: this process inherits the variable by which the parent may have hidden all GPUs
    redirect_output(Path(os.devnull))  # of libraries
    os.environ.update(visibility(cards))
    keep_private()
    try:
        if not plan.card.is_cpu:  # waits for runs on the GPU, as a run would
            queue = Queue(cards or (plan.card.name,))
            queue.join(Path("finetune --measure"))  # the name that waiting runs show
            while ahead := queue.ahead():
                sender.send(f"waiting for the GPU: {ahead[-1]}")
                time.sleep(0.5)
        sender.send(measure(plan, rows, adapter, sender.send))
    except FinetuneError as error:
        sender.send(error)
    except Exception as error:  # noqa: BLE001 - libraries raise other errors, such as out of memory
        sender.send(FinetuneError(f"the measurement failed: {type(error).__name__}: {error}"))


def measure(plan: Plan, rows: Rows, adapter: Path | None, progress: Progress) -> QuantisationCost:
    """Return the loss in the plain format, int8 and NF4. Raise CommandError for a checkpoint that is stored quantised."""
    import torch

    settings, name, on_cpu = plan.settings, plan.settings.model_name_or_path, plan.card.is_cpu
    config = read_config(settings)
    stored = trainable_formats(stored_quantisation(config, name))
    if stored and BITS_16 not in stored:
        raise CommandError(
            f"{name} is already stored in {stored[0].label}, so the cost of quantising can't be measured",
            "Give the original 16-bit model.",
        )
    token_counts = [sum(label != -100 for label in labels[1:]) for labels in rows["labels"]]
    formats: list[FormatLoss] = []
    plain_losses: list[float] = []
    for base_format in (BITS_32 if settings.dtype == "float32" else BITS_16, INT8, NF4):
        shape = shape_of(config, settings)
        offloaded = not on_cpu and shape.weight_bytes(base_format) > _RESIDENT_SHARE * plan.usable_bytes
        if offloaded and base_format.not_offloaded:
            continue
        changed = {
            **switches(base_format), "layer_offloading": "cpu" if offloaded else False, "offloaded_layers": shape.layers,
            "torch_compile": False, "launch": LaunchRecipe(),
        }  # fmt: skip
        row_losses = _row_losses(settings.model_copy(update=changed), rows, adapter, "cpu" if on_cpu else "cuda", progress)
        gc.collect()  # frees the model before the next one is loaded
        torch.cuda.empty_cache()
        plain_losses = plain_losses or row_losses
        gap = difference(plain_losses, row_losses, token_counts) if formats else None
        loss = sum(loss * count for loss, count in zip(row_losses, token_counts, strict=True)) / sum(token_counts)
        formats.append(FormatLoss(base_format.label, loss, *((gap.value, gap.low, gap.high) if gap else ())))
    return QuantisationCost(name, len(token_counts), sum(token_counts), tuple(formats), adapter is not None)


def _row_losses(settings: Settings, rows: Rows, adapter: Path | None, device: str, progress: Progress) -> list[float]:
    from finetune.evaluate.answerer import batches, load_model, loss_batch_tokens, run_halving
    from finetune.evaluate.score import losses

    ids, labels, base_format = rows["input_ids"], rows["labels"], settings.base_format
    progress(f"measuring {base_format.label}: loading")
    model = load_model(settings, adapter, device)
    row_losses: dict[int, float] = {}

    def compute(batch: list[int]) -> None:
        entries = losses(model, [(ids[row], labels[row]) for row in batch], device)
        row_losses.update({row: entry["loss"] for row, entry in zip(batch, entries, strict=True)})

    # int8 takes outlier columns of a whole batch in 16 bit: alone, a row's loss does not depend on its neighbours.
    # A CPU gains little by batches, and rounds 4-bit products of other widths otherwise.
    batch_tokens = 1 if device == "cpu" or base_format is INT8 else loss_batch_tokens(model)
    for batch in batches([len(row) for row in ids], batch_tokens):
        progress(f"measuring {base_format.label}: {len(row_losses):,} of {len(ids):,} rows")
        run_halving(batch, compute)
    return [row_losses[row] for row in range(len(ids))]
