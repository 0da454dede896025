"""One attempt at a run, without the supervisor and its retries: `python -m benchmarks.gpu.attempt RUN RESULT [--peft-cast]`.

The process is the worker itself, with memory by phase noted in RESULT beside the run's events.
"""

from __future__ import annotations

import argparse
import gc
import json
import sys
from pathlib import Path
from typing import Any

from benchmarks.gpu.phases import Phases, allocator
from finetune.run.directory import RunDirectory
from finetune.run.worker import Worker


class MeasuredWorker(Worker):
    """The worker, with the phases of its steps watched and PEFT's cast of inputs switched on if wanted."""

    def __init__(self, run: RunDirectory, peft_cast: bool) -> None:
        super().__init__(run)
        self.peft_cast, self.phases = peft_cast, Phases(on_cuda=not self.plan.card.is_cpu)
        self.phases.around(self.memory)

    def _build(self) -> tuple[Any, Any]:
        trainer, callback = super()._build()
        if self.peft_cast:
            restore_cast(trainer.model)
        self.phases.watch(trainer)
        return trainer, callback


def restore_cast(model: Any) -> None:
    """Have PEFT cast the inputs of its layers to fp32, as it does by itself (finetune.compat.peft.leave_casts_to_autocast).

    Raises RuntimeError when nothing had switched it off.
    """
    layers = [module for module in model.modules() if "_cast_input_dtype" in vars(module)]
    if not layers:
        raise RuntimeError("not available: PEFT's cast of inputs is not switched off here")
    for layer in layers:
        del layer._cast_input_dtype


def main() -> int:
    """Run the attempt; returns the worker's exit status."""
    parser = argparse.ArgumentParser()
    parser.add_argument("run", type=Path)
    parser.add_argument("result", type=Path)
    parser.add_argument("--peft-cast", action="store_true")
    options = parser.parse_args()
    worker = MeasuredWorker(RunDirectory(options.run), options.peft_cast)
    code = worker.main()
    options.result.write_text(json.dumps({"phases": worker.phases.peaks, "allocator": allocator()}))
    gc.freeze()
    return code


if __name__ == "__main__":
    sys.exit(main())
