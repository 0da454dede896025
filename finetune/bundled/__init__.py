"""Models and datasets made by scripts/bundled/, and questions that measure forgetting."""

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


def model_path(name: str) -> Path | None:
    """Return a bundled model's folder, or None."""
    return _MODELS.get(name)


def dataset_paths(name: str) -> dict[str, Path] | None:
    """Return a bundled dataset's files by split, or None."""
    return _DATASETS.get(name)
