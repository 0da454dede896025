"""One attempt at a run, without the supervisor and its retries: `python -m benchmarks.gpu.attempt RUN RESULT [--peft-cast on]`.

The process is the worker itself, with memory by phase noted in RESULT beside the run's events.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import Any

from benchmarks.gpu.phases import Phases, allocator
from finetune.garbage import leave_all
from finetune.run.directory import RunDirectory
from finetune.run.worker import Worker


class MeasuredWorker(Worker):
    """The worker, with the phases of its steps watched and PEFT's cast of inputs switched on or off."""

    def __init__(self, run: RunDirectory, peft_cast: bool | None) -> None:
        super().__init__(run)
        self.peft_cast, self.phases = peft_cast, Phases(on_cuda=not self.plan.card.is_cpu)
        self.phases.around(self.memory)

    def _build(self) -> tuple[Any, Any]:
        trainer, callback = super()._build()
        if self.peft_cast is not None:
            set_cast(trainer.model, self.peft_cast)
        self.phases.watch(trainer)
        return trainer, callback


def set_cast(model: Any, cast: bool) -> None:
    """Whether PEFT casts the inputs of its layers to the adapters' dtype. Raises RuntimeError when this PEFT can't be told."""
    layers = [module for module in model.modules() if hasattr(module, "_cast_input_dtype")]
    if not layers:
        raise RuntimeError("not available: this PEFT casts nothing")
    for layer in layers:
        layer.cast_input_dtype_enabled = cast


def main() -> int:
    """Run the attempt; returns the worker's exit status."""
    parser = argparse.ArgumentParser()
    parser.add_argument("run", type=Path)
    parser.add_argument("result", type=Path)
    parser.add_argument("--peft-cast", choices=("on", "off"))
    options = parser.parse_args()
    worker = MeasuredWorker(RunDirectory(options.run), options.peft_cast and options.peft_cast == "on")
    code = worker.main()
    options.result.write_text(json.dumps({"phases": worker.phases.peaks, "allocator": allocator()}))
    leave_all()
    return code


if __name__ == "__main__":
    sys.exit(main())
