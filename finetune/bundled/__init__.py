"""The bundled base model `tiny` and dataset `support`, both made by scripts/bundled/, and general questions written for it."""

from __future__ import annotations

from pathlib import Path

_HERE = Path(__file__).resolve().parent
_MODELS = {"tiny": _HERE / "tiny-base"}
_DATASETS = {"support": {"train": _HERE / "support" / "train.jsonl", "eval": _HERE / "support" / "eval.jsonl"}}


#: Short questions of general knowledge, arithmetic, language and form, to measure forgetting.
PROBE = _HERE / "probe.jsonl"


def model_path(name: str) -> Path | None:
    """Folder of the bundled model `name`; None when there is no such model."""
    return _MODELS.get(name)


def dataset_paths(name: str) -> dict[str, Path] | None:
    """Files of the bundled dataset `name`, as {"train": ..., "eval": ...}; None when there is no such dataset."""
    paths = _DATASETS.get(name)
    return dict(paths) if paths else None
