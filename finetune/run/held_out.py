"""A sweep's arm: up to which step it may train for now, and the held-out loss of each row at its evaluations."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from finetune.files import read_object, write_json

if TYPE_CHECKING:
    import torch

    from finetune.run.directory import RunDirectory


def pause_step(run: RunDirectory) -> int | None:
    """The step after which a sweep's arm stops with a checkpoint; None in a run that is none, or that may train to its end."""
    return (read_object(run.arm) or {}).get("pause_after")


def let_train(run: RunDirectory, step: int | None) -> None:
    """Make the run an arm that stops after `step`; None: at its end."""
    write_json(run.arm, {"pause_after": step})


def losses_path(run: RunDirectory, step: int) -> Path:
    """The file with each row's held-out loss after a step."""
    return run.path / "evaluations" / f"held-out-{step}.json"


def write_row_losses(run: RunDirectory, step: int, mean: float | None, rows: list[tuple[float, int]]) -> None:
    """Write them, and the mean over batches that the run's events have. Raises OSError."""
    path = losses_path(run, step)
    path.parent.mkdir(exist_ok=True)
    write_json(path, {"mean": mean, "losses": [loss for loss, _ in rows], "tokens": [tokens for _, tokens in rows]})


@contextlib.contextmanager
def recorded_row_losses(model: Any) -> Iterator[list[tuple[float, int]]]:
    """Yields the list to which each forward pass inside the block adds its rows; empty where the loss is not by TRL's head."""
    rows: list[tuple[float, int]] = []

    def record(_module: Any, _arguments: Any, inputs: dict[str, Any], outputs: Any) -> None:
        if getattr(outputs, "log_probs", None) is not None:
            rows.extend(row_losses(outputs, inputs))

    handle = model.register_forward_hook(record, with_kwargs=True)
    try:
        yield rows
    finally:
        handle.remove()


def row_losses(outputs: Any, inputs: dict[str, Any]) -> list[tuple[float, int]]:
    """Mean loss and number of the trained tokens of each row of a batch that TRL's head has computed."""
    losses, counted = -outputs.log_probs.double(), outputs.label_mask
    starts = _starts(inputs)
    if starts is None:
        sums, counts = losses.sum(dim=1).tolist(), counted.sum(dim=1).tolist()
        return [(total / max(1, count), int(count)) for total, count in zip(sums, counts, strict=True)]
    ends = [*starts[1:], losses.shape[1]]
    parts = [
        (losses[0, start:end].sum().item(), int(counted[0, start:end].sum())) for start, end in zip(starts, ends, strict=True)
    ]
    return [(total / max(1, count), count) for total, count in parts]


def _starts(inputs: dict[str, torch.Tensor]) -> list[int] | None:
    """First tokens of the rows of a batch without padding; None where each row is one of the tensor's."""
    positions = inputs.get("position_ids")
    if positions is None or positions.shape[0] != 1:
        return None
    return (positions[0] == 0).nonzero().flatten().tolist()
