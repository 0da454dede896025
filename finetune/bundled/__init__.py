"""The bundled base models `tiny` and `tiny-vision`, the datasets `support`, `support-pairs` and `parcels`, made by
scripts/bundled/, and general questions."""

from __future__ import annotations

from pathlib import Path

_HERE = Path(__file__).resolve().parent
_MODELS = {"tiny": _HERE / "tiny-base", "tiny-vision": _HERE / "tiny-vision"}
_DATASETS = {
    name: {split: _HERE / name / f"{split}.jsonl" for split in ("train", "eval")}
    for name in ("support", "support-pairs", "parcels")
}


#: Short questions of general knowledge, arithmetic, language and form, to measure forgetting.
PROBE = _HERE / "probe.jsonl"

#: Questions with tools that none of them answers, to measure whether a model calls one all the same.
NO_CALL_PROBE = _HERE / "no_call_probe.jsonl"


def model_path(name: str) -> Path | None:
    """Folder of the bundled model `name`; None when there is no such model."""
    return _MODELS.get(name)


def dataset_paths(name: str) -> dict[str, Path] | None:
    """Files of the bundled dataset `name`, as {"train": ..., "eval": ...}; None when there is no such dataset."""
    paths = _DATASETS.get(name)
    return dict(paths) if paths else None
