"""Reference log-probabilities of every example, computed once before training."""

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

_FACTS = ("data", "base", "base_config", "origin", "dtype", *SWITCHES)  # sealed facts that determine the log-probabilities


def add_reference(trainer: RunTrainer) -> str:
    """Add the reference columns to the trainer's datasets; return a hash of the log-probabilities."""
    folder = trainer.run.path / "reference"
    facts = {name: value for name, value in trainer.seal_facts.result().items() if name in _FACTS}
    datasets = {split: dataset for split in ("train", "eval") if (dataset := getattr(trainer, f"{split}_dataset")) is not None}
    # an earlier attempt's values are reused; a checkpoint sealed with other values is refused by the hash
    log_probs = _read_saved(folder, facts, trainer.events.warn)
    if log_probs is None or any(len(log_probs.get(split, ())) != len(dataset) for split, dataset in datasets.items()):
        with trainer.measured_phase("reference"):
            log_probs = {split: _compute_log_probs(trainer, dataset) for split, dataset in datasets.items()}
        _save(folder, log_probs, facts)
    for split, dataset in datasets.items():
        for column, numbers in zip(REFERENCE_COLUMNS, log_probs[split].T, strict=True):
            dataset = dataset.add_column(column, numbers.tolist())  # noqa: PLW2901
        setattr(trainer, f"{split}_dataset", dataset)
    return hashlib.sha256(b"".join(log_probs[split].tobytes() for split in datasets)).hexdigest()


def _read_saved(folder: Path, facts: dict[str, Any], warn: Callable[[str], None]) -> dict[str, np.ndarray] | None:
    if not folder.is_dir():
        return None
    problems = changes_in(folder)
    if not problems and read_json(folder / MANIFEST, dict).get("facts") != facts:
        problems = ["it belongs to other examples or another model"]
    if problems:
        warn(f"the precomputed reference is computed again: {problems[0]}")
        return None
    return {path.stem: np.load(path, allow_pickle=False) for path in folder.glob("*.npy")}


def _save(folder: Path, log_probs: dict[str, np.ndarray], facts: dict[str, Any]) -> None:
    folder.mkdir(exist_ok=True)
    (folder / MANIFEST).unlink(missing_ok=True)  # a folder without a manifest is incomplete
    for split, numbers in log_probs.items():
        np.save(folder / f"{split}.npy", numbers, allow_pickle=False)
    write_manifest(folder, {"facts": facts})


def _compute_log_probs(trainer: RunTrainer, dataset: Any) -> np.ndarray:
    model, batch_size = trainer.model, trainer.plan.settings.per_device_train_batch_size
    # longest examples first: memory runs out early or never
    longest_first = np.argsort(-np.array(row_lengths(dataset)), kind="stable")
    log_probs = np.zeros((len(dataset), 2), np.float32)  # columns: chosen, rejected
    model.eval()  # type: ignore[union-attr]
    for start in range(0, len(dataset), batch_size):
        indices = longest_first[start : start + batch_size]
        inputs = trainer.on_device([dataset[int(index)] for index in indices])
        with trainer.accelerator.autocast(), narrow_tiles(model.config, on_cpu=trainer.plan.card.is_cpu):  # type: ignore[union-attr]
            pair_log_probs = trainer.method.reference_log_probs(model, inputs if trainer.needs_mask else without_mask(inputs))
        # a batch is all chosen answers, then all rejected answers
        log_probs[indices] = pair_log_probs.float().reshape(2, -1).T.cpu().numpy()
        os.utime(trainer.events.path)  # the supervisor takes an old events.jsonl for a hang
    model.train()  # type: ignore[union-attr]
    return log_probs
