"""Trackers in `report_to`: TensorBoard, W&B and Trackio, with files in RUN/trackers.

Nothing leaves the machine without WANDB_MODE=online or TRACKIO_SPACE_ID.
"""

from __future__ import annotations

import contextlib
import json
import os
import sys
from collections.abc import Callable, Collection, Iterator
from dataclasses import fields
from pathlib import Path
from typing import Any

from finetune.events import CHARTS, Evaluation, Event, EventWriter, Memory, Start, Step
from finetune.planner.plan import Plan
from finetune.requirements import installed_version
from finetune.run.directory import RunDirectory

_PROJECT = "finetune"
#: Tracker name of each event field: transformers' name where one exists, else the field's name with its unit.
_STEP_NAMES = {
    **{name: name for name in CHARTS},
    "loss": "train/loss", "grad_norm": "train/grad_norm", "learning_rate": "train/learning_rate", "epoch": "train/epoch",
    "token_accuracy": "train/mean_token_accuracy", "step_s": "step_s",
    **{field.name: f"memory/{field.name}" for field in fields(Memory)},
    "temperature_c": "card/temperature_c", "power_w": "card/power_w",
}  # fmt: skip
#: A function that logs the values of a step, and a function that closes the tracker with the exit status.
_Tracker = tuple[Callable[[dict[str, float], int], Any], Callable[[int], Any]]
_EVAL_NAMES = {"eval_loss": "eval/loss", "eval_token_accuracy": "eval/mean_token_accuracy", "eval_s": "eval_s"}


def missing_trackers(names: Collection[str]) -> list[str]:
    """Return a message with the install command per missing tracker."""
    missing = (name for name in names if installed_version(name) is None)
    return [f"report_to names {name}, which is not installed: pip install {name}" for name in missing]


class Trackers:
    """The trackers of one attempt."""

    def __init__(self, plan: Plan, run: RunDirectory, events: EventWriter) -> None:
        self._plan, self._run, self._events = plan, run, events
        names = ("peak_bytes", "peak_high_bytes", "allocated_bytes") if plan.forecast else ()
        # constant lines in the charts of measured bytes
        self._forecast: dict[str, float] = {f"forecast/{name}": getattr(plan.forecast, name) for name in names}
        if plan.budget_bytes is not None:
            self._forecast["forecast/budget_bytes"] = plan.budget_bytes
        self._open: dict[str, _Tracker] = {}

    def on_event(self, event: Event) -> None:
        # called after the event is written: trackers affect neither the events nor the measured step time
        if isinstance(event, Start):
            self._start(event.step)
        elif isinstance(event, Step):
            self._log(event, _STEP_NAMES, "train", self._forecast)
        elif isinstance(event, Evaluation):
            self._log(event, _EVAL_NAMES, "eval", {})

    def close(self, code: int) -> None:
        for name, (_, close) in self._open.items():
            try:
                close(code)
            except Exception as error:  # noqa: BLE001 - the final event must stay the last event
                print(f"{name} could not be closed: {type(error).__name__}: {error}", file=sys.stderr)  # noqa: T201
        self._open.clear()

    def _start(self, step: int) -> None:
        settings, plan_facts = self._plan.settings, {"card": self._plan.card.name, "forecast/verdict": self._plan.verdict.value}
        group = self._run.path.resolve().name
        # W&B and Trackio can't undo steps: a resumed run is a new run in the same group
        config = {**settings.model_dump(mode="json"), **plan_facts, **self._forecast}
        run = {"name": f"{group}-from-{step}" if step else group, "group": group, "config": config}
        for name in settings.report_to:
            with self._switched_off_by_errors(name):
                folder = self._run.trackers.resolve() / name
                folder.mkdir(parents=True, exist_ok=True)
                self._open[name] = _OPEN[name](folder, step, run)

    def _log(self, event: Step | Evaluation, names: dict[str, str], prefix: str, constants: dict[str, float]) -> None:
        values = {name: value for field, name in names.items() if (value := getattr(event, field)) is not None}
        values |= {f"{prefix}/{name}": value for name, value in event.metrics.items()} | constants
        for name, (log, _) in list(self._open.items()):
            with self._switched_off_by_errors(name):
                log(values, event.step)

    @contextlib.contextmanager
    def _switched_off_by_errors(self, name: str) -> Iterator[None]:
        try:
            yield
        except Exception as error:  # noqa: BLE001 - a broken tracker must not end the training
            self._open.pop(name, None)
            self._events.warn(f"{name} is switched off: {type(error).__name__}: {error}; events.jsonl has all numbers")


def _open_tensorboard(folder: Path, step: int, run: dict[str, Any]) -> _Tracker:
    from torch.utils.tensorboard import SummaryWriter

    # a resumed run repeats the steps after its checkpoint
    writer = SummaryWriter(str(folder), purge_step=step + 1 if step else None)
    writer.add_text("plan", f"```json\n{json.dumps(run['config'], indent=1)}\n```", step)

    def log(values: dict[str, float], step: int) -> None:
        for name, value in values.items():
            writer.add_scalar(name, value, step)
        writer.flush()

    return log, lambda _: writer.close()


def _open_wandb(folder: Path, step: int, run: dict[str, Any]) -> _Tracker:
    os.environ |= {
        "WANDB_MODE": "offline", "WANDB_ERROR_REPORTING": "false", "WANDB_CONSOLE": "off", "WANDB_FINISH_TIMEOUT": "300",
        "WANDB_DIR": str(folder.parent), "WANDB_CACHE_DIR": f"{folder}/cache", "WANDB_DATA_DIR": f"{folder}/data",
        "WANDB_PROJECT": _PROJECT, **os.environ,
    }  # fmt: skip
    import wandb

    opened = wandb.init(**run)
    opened.summary.update({name: value for name, value in run["config"].items() if name.startswith("forecast/")})
    return opened.log, lambda code: opened.finish(exit_code=code)


def _open_trackio(folder: Path, step: int, run: dict[str, Any]) -> _Tracker:
    os.environ.setdefault("TRACKIO_DIR", str(folder))  # read by Trackio at import
    import trackio

    opened = trackio.init(_PROJECT, **run, embed=False, auto_log_gpu=False, auto_log_cpu=False)
    return opened.log, lambda _: opened.finish()


#: By name; `Trackers` in settings/schema.py lists the names for recipes.
_OPEN: dict[str, Callable[[Path, int, dict[str, Any]], _Tracker]] = {
    "tensorboard": _open_tensorboard, "wandb": _open_wandb, "trackio": _open_trackio,
}  # fmt: skip
