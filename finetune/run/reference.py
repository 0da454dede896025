"""Reference log-probabilities of every row, computed once before training."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from finetune.compat.trl import narrow_tiles
from finetune.files import read_json
from finetune.manifest import MANIFEST, changes_in, write_manifest
from finetune.methods.method import REFERENCE_COLUMNS
from finetune.methods.row_order import row_lengths
from finetune.model.padding import without_mask
from finetune.settings.base_formats import SWITCHES

if TYPE_CHECKING:
    from finetune.run.training import RunTrainer

_FACTS = ("data", "base", "base_config", "origin", "dtype", *SWITCHES)  # sealed facts that determine the values


def add_reference(trainer: RunTrainer) -> str:
    """Add the reference columns to the trainer's rows; return the hash of the values."""
    folder = trainer.run.path / "reference"
    facts = {name: value for name, value in trainer.seal_facts.result().items() if name in _FACTS}
    rows = {name: part for name in ("train", "eval") if (part := getattr(trainer, f"{name}_dataset")) is not None}
    # an earlier attempt's values are reused; a checkpoint sealed with other values is refused by the hash
    values = _read(folder, facts, trainer.events.warn)
    if values is None or any(len(values.get(name, ())) != len(part) for name, part in rows.items()):
        with trainer.measured_phase("reference"):
            values = {name: _computed(trainer, part) for name, part in rows.items()}
        _write(folder, values, facts)
    for name, part in rows.items():
        for column, numbers in zip(REFERENCE_COLUMNS, values[name].T, strict=True):
            part = part.add_column(column, numbers.tolist())  # noqa: PLW2901
        setattr(trainer, f"{name}_dataset", part)
    return hashlib.sha256(b"".join(values[name].tobytes() for name in rows)).hexdigest()


def _read(folder: Path, facts: dict[str, Any], warn: Callable[[str], None]) -> dict[str, np.ndarray] | None:
    if not folder.is_dir():
        return None
    problems = changes_in(folder)
    if not problems and read_json(folder / MANIFEST, dict).get("facts") != facts:
        problems = ["it belongs to other examples or another model"]
    # values of other rows or another model, or damaged values
    if problems:
        warn(f"the precomputed reference is computed again: {problems[0]}")
        return None
    return {path.stem: np.load(path, allow_pickle=False) for path in folder.glob("*.npy")}


def _write(folder: Path, values: dict[str, np.ndarray], facts: dict[str, Any]) -> None:
    folder.mkdir(exist_ok=True)
    (folder / MANIFEST).unlink(missing_ok=True)
    for name, numbers in values.items():
        np.save(folder / f"{name}.npy", numbers, allow_pickle=False)
    write_manifest(folder, {"facts": facts})


def _computed(trainer: RunTrainer, rows: Any) -> np.ndarray:
    model, size = trainer.model, trainer.plan.settings.per_device_train_batch_size
    # longest rows first: memory runs out early or never
    order = np.argsort(-np.array(row_lengths(rows)), kind="stable")
    # columns: chosen, rejected
    values = np.zeros((len(rows), 2), np.float32)
    model.eval()  # type: ignore[union-attr]
    for start in range(0, len(rows), size):
        indices = order[start : start + size]
        inputs = trainer.on_device([rows[int(index)] for index in indices])
        with trainer.accelerator.autocast(), narrow_tiles(model.config, on_cpu=trainer.plan.card.is_cpu):  # type: ignore[union-attr]
            computed = trainer.method.reference_log_probs(model, inputs if trainer.masked else without_mask(inputs))
        values[indices] = computed.float().reshape(2, -1).T.cpu().numpy()
        os.utime(trainer.events.path)  # keeps the supervisor from seeing a hang
    model.train()  # type: ignore[union-attr]
    return values
