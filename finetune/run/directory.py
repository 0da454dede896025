"""The run directory: all that is known of a run is in it.

recipe.yaml plan.json events.jsonl log.txt process.json data/ checkpoints/ adapter/ trackers/
"""

from __future__ import annotations

import errno
import shutil
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from finetune.errors import DiskFull, RecipeError

_DISK_ERRORS = {
    errno.ENOSPC: "the disk is full",
    errno.EDQUOT: "the disk quota is used up",
    errno.EROFS: "the place is read-only",
}


@dataclass(frozen=True)
class RunDirectory:
    """Paths of one run."""

    path: Path

    @property
    def recipe(self) -> Path:
        """What the user asked for; `finetune run RUN/recipe.yaml` repeats it."""
        return self.path / "recipe.yaml"

    @property
    def plan(self) -> Path:
        """Every setting resolved, with reasons and forecast."""
        return self.path / "plan.json"

    @property
    def events(self) -> Path:
        """What happened, one JSON line each."""
        return self.path / "events.jsonl"

    @property
    def adjustments(self) -> Path:
        """What out-of-memory retries changed of the plan's settings."""
        return self.path / "adjustments.json"

    @property
    def snapshot(self) -> Path:
        """The CUDA allocator's history, when it was recorded."""
        return self.path / "memory_snapshot.pickle"

    @property
    def log(self) -> Path:
        """Output of the training process."""
        return self.path / "log.txt"

    @property
    def process(self) -> Path:
        """Process ids with their start times."""
        return self.path / "process.json"

    @property
    def lock(self) -> Path:
        """Held (flock) as long as anything of the run lives."""
        return self.path / "lock"

    @property
    def data(self) -> Path:
        """The tokenised rows, so that a resumed run sees the same ones."""
        return self.path / "data"

    @property
    def checkpoints(self) -> Path:
        """Sealed checkpoints, `checkpoint-<step>`."""
        return self.path / "checkpoints"

    @property
    def adapter(self) -> Path:
        """The result: adapter, tokenizer and how they were made."""
        return self.path / "adapter"

    @property
    def trackers(self) -> Path:
        """Files of TensorBoard, W&B and Trackio, when the recipe reports to them."""
        return self.path / "trackers"


def create(path: Path, fill: Any) -> RunDirectory:
    """Make a run directory whole or not at all: `fill(RunDirectory)` writes into a hidden one, which is then renamed.

    A taken name gets -2, -3, ... Raises DiskFull when the place can't be written to.
    """
    building: Path | None = None
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        building = Path(tempfile.mkdtemp(prefix=f".{path.name}-", dir=path.parent))
        building.chmod(0o755)
        fill(RunDirectory(building))
        return RunDirectory(_rename_to_free_name(building, path))
    except OSError as error:
        if error.errno in (errno.EEXIST, errno.ENOTDIR):
            raise DiskFull(f"output_dir {path}: a part of this path is a file", "Set output_dir to another place.") from None
        reason = _DISK_ERRORS.get(error.errno or 0, error.strerror or str(error))
        raise DiskFull(
            f"the run directory {path} can't be written: {reason}",
            "Free some space, or set output_dir to a place that is yours.",
        ) from None
    finally:
        if building is not None and building.exists():
            shutil.rmtree(building, ignore_errors=True)


def _rename_to_free_name(building: Path, path: Path) -> Path:
    for number in range(1, 10_000):
        target = path if number == 1 else path.with_name(f"{path.name}-{number}")
        if target.exists():
            continue
        try:
            building.rename(target)
        except OSError as error:
            if error.errno in (errno.EEXIST, errno.ENOTEMPTY):  # somebody was faster
                continue
            raise
        return target
    raise OSError(errno.EEXIST, "ten thousand runs have this name already")


def open_run(source: str | Path, runs: Path = Path("runs")) -> RunDirectory:
    """The run at `source`: its directory, its name under runs/, or `latest`. Raises RecipeError when there is none."""
    if str(source) == "latest":
        found = list_runs(runs)
        if not found:
            raise RecipeError("there are no runs yet", "Start one: finetune run recipes/tiny-cpu.yaml")
        return found[0]
    for path in (Path(source), runs / str(source)):
        if (path / "plan.json").is_file():
            return RunDirectory(path)
    raise RecipeError(f"{source} is not a run directory (it has no plan.json)", "`finetune runs` lists the runs.")


def require_data(run: RunDirectory) -> None:
    """Raises RecipeError when the run's rows or tokenizer are not there any more."""
    if not ((run.data / "fingerprint").is_file() and (run.data / "tokenizer").is_dir()):
        raise RecipeError(f"{run.data} is gone or not whole", f"Start anew: finetune run {run.recipe}")


def list_runs(runs: Path = Path("runs")) -> list[RunDirectory]:
    """Runs below a folder, newest first."""
    found = [RunDirectory(path.parent) for path in runs.glob("*/plan.json") if not path.parent.name.startswith(".")]
    return sorted(found, key=lambda run: (run.plan.stat().st_mtime, run.path.name), reverse=True)
