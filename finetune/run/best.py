"""Held-out losses: the best step, the losses of each row, and the result folder of a finished run."""

from __future__ import annotations

import contextlib
import itertools
import math
import shutil
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from finetune import distributed
from finetune.events import Result
from finetune.files import changes_in, read_json_as, to_json, write_json, write_manifest
from finetune.model.configuration import ADAPTER_CONFIG
from finetune.model.weights import ADAPTER_WEIGHTS
from finetune.run.directory import RunDirectory
from finetune.run.seal import verify
from finetune.system import rename, sync_folder

if TYPE_CHECKING:
    from finetune.run.training import RunTrainer


@dataclass(frozen=True)
class EvaluatedStep:
    """Held-out loss after a step; infinite when not a number."""

    step: int
    loss: float


# the best step and the result folder follow from the trainer's history, which is sealed with every checkpoint
def evaluations(history: list[dict[str, Any]]) -> list[EvaluatedStep]:
    """Return the evaluations in a trainer's `log_history`."""
    losses = ((entry["step"], float(entry["eval_loss"])) for entry in history if "eval_loss" in entry)
    return [EvaluatedStep(step, loss if math.isfinite(loss) else math.inf) for step, loss in losses]


def best_of(evaluated: list[EvaluatedStep]) -> EvaluatedStep | None:
    """Return the first evaluation with the lowest finite held-out loss."""
    finite = [evaluation for evaluation in evaluated if evaluation.loss < math.inf]
    return min(finite, key=lambda evaluation: evaluation.loss, default=None)


def since_best(evaluated: list[EvaluatedStep]) -> int:
    """Return the number of evaluations after the best one."""
    best = best_of(evaluated)
    return len(evaluated) - (evaluated.index(best) + 1 if best else 0)


def _adapter_of_step(run: RunDirectory, step: int) -> Path:
    return run.checkpoints / f"checkpoint-{step}" if step else run.base_adapter  # step 0 is the base adapter


def _damage(run: RunDirectory, step: int) -> list[str]:
    return verify(_adapter_of_step(run, step)) if step else changes_in(run.base_adapter)


def best_sealed(evaluated: list[EvaluatedStep], run: RunDirectory) -> EvaluatedStep | None:
    """Return the best step whose checkpoint is intact on every machine."""
    for evaluation in sorted(evaluated, key=lambda evaluation: evaluation.loss):
        if evaluation.loss < math.inf and distributed.all_reduce_min(int(not _damage(run, evaluation.step))):
            return evaluation
    return None


def unusable_best_message(step: int, problem: str) -> str:
    """Return the warning about an unusable best checkpoint."""
    return f"step {step} had the lowest held-out loss, but checkpoint-{step} can't be used ({problem})"


def save_result(trainer: RunTrainer) -> Result | None:
    """Write adapter/ with the best step. All ranks call this; None on ranks that write nothing."""
    run, best = trainer.run, trainer.best
    step, is_writer = trainer.state.global_step, distributed.this_rank().is_local_rank_0
    evaluated = evaluations(trainer.state.log_history)
    loss = next((evaluation.loss for evaluation in evaluated if evaluation.step == step and evaluation.loss < math.inf), None)
    building = run.path / ".adapter"
    if is_writer:
        shutil.rmtree(building, ignore_errors=True)
    distributed.barrier()
    if trainer.plan.settings.launch.strategy != "ddp":  # sharded weights: all ranks take part in gathering
        trainer.save_model(str(building))
    elif is_writer:
        model: Any = trainer.model
        model.save_pretrained(str(building), safe_serialization=True)
    if not is_writer:
        return None
    result = Result(step=step, path=run.adapter.name, eval_loss=loss, last_step=step)
    if best and best.step != step:
        if problems := _damage(run, best.step):
            message = unusable_best_message(best.step, "; ".join(problems[:3]))
            trainer.events.warn(f"{message}; the result is the last step")
        else:
            shutil.copyfile(_adapter_of_step(run, best.step) / ADAPTER_WEIGHTS, building / ADAPTER_WEIGHTS)
            result = replace(result, step=best.step, eval_loss=best.loss, last_eval_loss=loss)
    (building / "training_args.bin").unlink(missing_ok=True)  # a pickle, unsafe to load
    trainer.processing_class.save_pretrained(str(building))  # type: ignore[union-attr]
    # safetensors makes the file readable only by the owner
    shutil.copymode(building / ADAPTER_CONFIG, building / ADAPTER_WEIGHTS)
    shutil.copy(run.plan, building / "plan.json")
    write_manifest(building, {"step": result.step, "eval_loss": result.eval_loss, "facts": trainer.seal_facts.result()})
    shutil.rmtree(run.adapter, ignore_errors=True)
    rename(building, run.adapter)
    sync_folder(run.path)  # before the run reports its end: the result must survive a power cut
    return result


def result_summary(result: Result, run: RunDirectory, total_steps: int) -> str:
    """Return a message that says which step the adapter is from, and why."""
    if result.step == result.last_step:
        return f"adapter in {run.adapter}"
    continued = "" if result.step else ", the adapter that training continued from"
    text = f"adapter in {run.adapter}: best at step {result.step} of {total_steps}{continued}"
    if result.eval_loss is not None and result.last_eval_loss is not None:
        text += f"; held-out loss {result.eval_loss:.4g} there and {result.last_eval_loss:.4g} at the last step"
    return text


@dataclass(frozen=True)
class RowLosses:
    """Held-out losses of an arm after a step; empty where unknown."""

    step: int
    mean: float
    losses: tuple[float, ...] = ()
    tokens: tuple[int, ...] = ()


def write_row_losses(run: RunDirectory, step: int, mean: float | None, rows: list[tuple[float, int]]) -> None:
    """Write the loss and trained tokens of each row, and the mean loss over batches. Raises OSError."""
    path = run.path / "evaluations" / f"held-out-{step}.json"
    path.parent.mkdir(exist_ok=True)
    losses, tokens = zip(*rows, strict=True) if rows else ((), ())
    write_json(path, to_json(RowLosses(step, math.nan if mean is None else mean, losses, tokens)))


def read_row_losses(run: RunDirectory) -> list[RowLosses]:
    """Return the saved held-out losses of an arm by step."""
    entries = (read_json_as(path, RowLosses) for path in (run.path / "evaluations").glob("held-out-*.json"))
    return sorted(filter(None, entries), key=lambda entry: entry.step)


def lowest_losses(evaluations: Iterable[RowLosses]) -> RowLosses | None:
    """Return the losses with the lowest finite mean."""
    finite = (losses for losses in evaluations if math.isfinite(losses.mean))
    return min(finite, key=lambda losses: losses.mean, default=None)


@contextlib.contextmanager
def recorded_row_losses(model: Any) -> Iterator[list[tuple[float, int]]]:
    """Yield a list to which each forward pass adds the loss and trained tokens of its rows."""
    rows: list[tuple[float, int]] = []

    def record(_module: Any, _arguments: Any, inputs: dict[str, Any], outputs: Any) -> None:
        # only TRL's loss head returns log_probs
        if getattr(outputs, "log_probs", None) is not None:
            rows.extend(row_losses(outputs, inputs))

    handle = model.register_forward_hook(record, with_kwargs=True)
    try:
        yield rows
    finally:
        handle.remove()


def row_losses(outputs: Any, inputs: dict[str, Any]) -> list[tuple[float, int]]:
    """Return mean loss and trained tokens of each row of a batch."""
    losses, is_trained = -outputs.log_probs.double(), outputs.label_mask
    positions = inputs.get("position_ids")
    if positions is None or positions.shape[0] != 1:  # padded batch: one row per tensor row
        sums, counts = losses.sum(dim=1).tolist(), is_trained.sum(dim=1).tolist()
    else:  # padding-free batch: each row starts at position 0
        starts = (positions[0] == 0).nonzero().flatten().tolist()
        spans = [slice(start, end) for start, end in itertools.pairwise([*starts, losses.shape[1]])]
        sums = [losses[0, span].sum().item() for span in spans]
        counts = [is_trained[0, span].sum().item() for span in spans]
    return [(total / max(1, count), int(count)) for total, count in zip(sums, counts, strict=True)]
