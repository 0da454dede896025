"""Measure what quantising the base costs on held-out rows, for `plan --measure`, `run --measure` and `eval --quantisation`.

One model at a time, in a child process: `python -m finetune.evaluate.quantisation JOB.json` prints its progress as lines;
the last one is the result as JSON.
"""

from __future__ import annotations

import contextlib
import functools
import gc
import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from finetune.card.visible import environment_with_gpus
from finetune.errors import CommandError, DataError, FinetuneError
from finetune.evaluate.paired import difference
from finetune.events import Evaluation, read_events
from finetune.files import read_json, sha256_of, write_json
from finetune.model.configuration import read_config
from finetune.model.prequantised import stored_quantisation, trainable_formats
from finetune.planner.plan import Plan, read_plan
from finetune.planner.quantisation_cost import FormatLoss, QuantisationCost, Sequences, cost_path, stored_sequences
from finetune.planner.shape import shape_of
from finetune.privacy import keep_private
from finetune.run.card import cards_of, visibility
from finetune.run.card_queue import card_queue
from finetune.run.directory import RunDirectory
from finetune.serialise import from_json, read_own, to_json
from finetune.settings import LaunchRecipe, Recipe, Settings
from finetune.settings.base_formats import BITS_16, BITS_32, INT8, NF4, BaseFormat, base_format_of, switches

if TYPE_CHECKING:
    from finetune.card.card import Card
    from finetune.planner.planning import RowsRead

Progress = Callable[[str], None]
#: Of a file with MOST_ROWS long rows.
_MOST_JOB_BYTES = 2**30
#: Weights that take more of the free memory than this leave their layers in host memory.
_RESIDENT_SHARE = 0.8
_HOLD_OUT = "Set dataset.test_split_size=0.1, or dataset.eval_path=FILE."


@dataclass(frozen=True)
class Job:
    """`free_bytes`: of the GPU; None on a CPU. `cards`: GPUs that it is queued for. `adapter`: its folder."""

    settings: Settings
    sequences: Sequences
    free_bytes: int | None = None
    cards: tuple[str, ...] = ()
    adapter: Path | None = None

    @property
    def on_cpu(self) -> bool:
        return self.free_bytes is None


def measure_recipe(recipe: Recipe, card: Card, rows: Callable[[Recipe], RowsRead], progress: Progress) -> QuantisationCost:
    """The base's losses on the recipe's held-out rows. Raises CommandError where nothing can be measured."""
    from finetune.planner.planning import plan_recipe

    if not card.is_cpu and card.source == "catalogue":
        raise CommandError(f"measuring needs {card.name}, which is not in this machine", "Set gpu=auto, or measure nothing.")
    read: list[RowsRead] = []

    def read_rows(resolved: Recipe) -> RowsRead:
        read.append(rows(resolved))
        return read[-1]

    plan = plan_recipe(recipe, card, read_rows, progress=progress)
    if read[-1].held_out is None and plan.data_problem:
        raise DataError([*plan.data_problem.problems], plan.data_problem.fix)
    return measure_plan(plan, read[-1].held_out, progress)


def measure_run(run: RunDirectory, adapter: Path, progress: Progress) -> tuple[dict[str, QuantisationCost], int | None]:
    """Costs for a run's base and tuned model on its held-out rows, and the steps that won the base's cost back.

    A step wins the cost back when the held-out loss has fallen by the cost of the run's format; None if no step did, or the
    cost is unknown. Raises CommandError without held-out rows.
    """
    plan, held_out = read_plan(run.plan), stored_sequences(run.data / "eval")
    costs = {name: measure_plan(plan, held_out, progress, folder) for name, folder in (("base", None), ("tuned", adapter))}
    entry = costs["base"].of(base_format_of(plan.settings).label)
    if entry is None or entry.cost is None:
        return costs, None
    curve = {0: entry.loss}
    for event in read_events(run.events):
        if isinstance(event, Evaluation) and event.step > 0 and event.eval_loss is not None:
            curve[event.step] = event.eval_loss
    return costs, steps_to_win_back(entry.cost, sorted(curve.items()))


def steps_to_win_back(cost: float, curve: list[tuple[int, float]]) -> int | None:
    """Optimizer steps after which a held-out loss had fallen by `cost`, between its evaluations by a straight line.

    `curve`: steps and losses, from the one before training.
    """
    for (step, loss), (next_step, next_loss) in zip(curve, curve[1:], strict=False):
        if curve[0][1] - next_loss >= cost > 0:
            share = (loss - curve[0][1] + cost) / (loss - next_loss)
            return max(1, round(step + share * (next_step - step)))
    return None


def measure_plan(
    plan: Plan, held_out: Callable[[], Sequences] | None, progress: Progress, adapter: Path | None = None
) -> QuantisationCost:
    """Measure the losses of a plan's base model, or of base and adapter, in a child process.

    Raises CommandError without held-out rows, and the errors of the process.
    """
    if held_out is None:
        raise CommandError("no rows are held out", _HOLD_OUT)
    cards = cards_of(plan)[:1]
    job = Job(plan.settings, held_out(), None if plan.card.is_cpu else plan.usable_bytes, cards or (plan.card.name,), adapter)
    environment = {**environment_with_gpus(), **visibility(cards), "PYTHONUTF8": "1", "TOKENIZERS_PARALLELISM": "false"}
    with tempfile.TemporaryDirectory() as folder:
        path, errors_path, last = Path(folder) / "job.json", Path(folder) / "errors", ""
        write_json(path, to_json(job))
        with errors_path.open("wb") as errors, subprocess.Popen(
            [sys.executable, "-P", "-m", "finetune.evaluate.quantisation", str(path)], stdout=subprocess.PIPE, stderr=errors,
            text=True, encoding="utf-8", env=environment,
        ) as process:  # fmt: skip
            assert process.stdout is not None
            try:
                for line in process.stdout:
                    last = line.strip()
                    if not last.startswith("{"):
                        progress(last)
            except BaseException:
                process.terminate()
                raise
        if process.returncode:
            stderr = errors_path.read_text("utf-8", errors="replace").strip()
            reason = stderr.rpartition("\n")[2] or "its process was killed"
            raise FinetuneError.written_by(stderr) or FinetuneError(f"measuring ended: {reason}")
    return from_json(QuantisationCost, json.loads(last))


def measure(job: Job, progress: Progress = lambda _: None) -> QuantisationCost:
    """The loss of the rows in the plain format, int8 and NF4. Formats measured before, also by a killed call, are not again.

    Raises CommandError for a checkpoint that is stored quantised, and without rows that have a trained token.
    """
    settings, name = job.settings, job.settings.model_name_or_path
    stored = trainable_formats(stored_quantisation(read_config(settings), name))
    if stored and BITS_16 not in stored:
        raise CommandError(
            f"{name} is stored in {stored[0].label}: what that costs can't be measured on it",
            "Give the 16-bit model that it was made from.",
        )
    tokens = [sum(label != -100 for label in labels[1:]) for labels in job.sequences.labels]
    if not any(tokens):
        raise CommandError("no held-out row has a trained token", _HOLD_OUT)
    files = sorted(job.adapter.glob("adapter_*")) if job.adapter else []
    path = cost_path(settings, job.sequences, on_cpu=job.on_cpu, adapter=[sha256_of(file) for file in files])
    row_losses, left_out = read_own(path, dict[str, list[float]], "row_losses") or {}, []

    def keep(cost: QuantisationCost | None) -> None:
        with contextlib.suppress(OSError):  # without a cache it is measured again
            path.parent.mkdir(parents=True, exist_ok=True)
            write_json(path, {"row_losses": row_losses, "cost": cost and to_json(cost)})

    for base_format in (BITS_32 if settings.dtype == "float32" else BITS_16, INT8, NF4):
        if base_format.label in row_losses:
            continue
        if not (settings_of_format := _settings_of(job, base_format)):
            left_out.append(f"{base_format.label} was not measured: it does not fit, and its layers can't be offloaded")
            continue
        row_losses[base_format.label] = _row_losses(job, settings_of_format, f"measuring {base_format.label}: ", progress)
        keep(None)
    formats = tuple(_with_cost(label, row_losses, tokens) for label in row_losses)
    cost = QuantisationCost(name, len(tokens), sum(tokens), formats, job.adapter is not None, tuple(left_out))
    keep(cost)
    return cost


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


def _row_losses(job: Job, settings: Settings, what: str, progress: Progress) -> list[float]:
    """Mean loss of each row's trained tokens, the model loaded for it and freed again."""
    import torch

    from finetune.evaluate.answerer import load_model
    from finetune.evaluate.kv_cache import loss_batch_tokens, run_halving
    from finetune.evaluate.score import batches, losses

    progress(f"{what}loading")
    device = "cpu" if job.on_cpu else "cuda"
    model = load_model(settings, job.adapter, device)
    ids, labels = job.sequences.ids, job.sequences.labels
    values: dict[int, float] = {}

    def compute(batch: list[int]) -> None:
        entries = losses(model, [ids[row] for row in batch], [labels[row] for row in batch], device)
        values.update({row: entry["loss"] for row, entry in zip(batch, entries, strict=True)})

    try:
        # int8 takes outlier columns of a whole batch in 16 bit: alone, a row's loss does not depend on its neighbours.
        # A CPU gains little by batches, and rounds 4-bit products of other widths otherwise.
        batch_tokens = 1 if job.on_cpu or base_format_of(settings) is INT8 else loss_batch_tokens(model)
        for batch in batches([len(row) for row in ids], batch_tokens):
            progress(f"{what}{len(values):,} of {len(ids):,} rows")
            run_halving(batch, compute)
    finally:
        model = None
        gc.collect()
        if not job.on_cpu:
            torch.cuda.empty_cache()
    return [values[row] for row in range(len(ids))]


def _with_cost(label: str, row_losses: dict[str, list[float]], tokens: list[int]) -> FormatLoss:
    plain, values = next(iter(row_losses.values())), row_losses[label]
    loss = sum(value * count for value, count in zip(values, tokens, strict=True)) / sum(tokens)
    gap = None if values is plain else difference(plain, values, tokens)
    return FormatLoss(label, loss, gap.value, gap.low, gap.high) if gap else FormatLoss(label, loss)


def main() -> int:
    """Entry point of the process. On a GPU it waits for runs, as a run would."""
    keep_private()
    path = Path(sys.argv[1])
    progress = functools.partial(print, flush=True)
    try:
        job = from_json(Job, read_json(path, dict, max_bytes=_MOST_JOB_BYTES))
        with contextlib.ExitStack() as stack:
            if not job.on_cpu:
                queue = card_queue(job.cards)
                queue.join(path)
                stack.callback(queue.leave)
                while ahead := queue.ahead():
                    progress(f"waiting for the GPU: {ahead[-1]}")
                    time.sleep(0.5)
            cost = measure(job, progress)
    except FinetuneError as error:
        sys.stderr.write(json.dumps(error.as_json()) + "\n")
        return error.exit_code
    progress(json.dumps(to_json(cost)))
    return 0


if __name__ == "__main__":
    sys.exit(main())
