"""LoRA fine-tuning on your GPU, with a memory forecast. As a library: docs/library.md."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from finetune.api.callback import MemoryCallback
    from finetune.api.forecasts import Fit, fits
    from finetune.api.memory import lean, track
    from finetune.api.plans import plan, read_plan

__version__ = "0.1.0"
__all__ = ["Fit", "MemoryCallback", "fits", "lean", "plan", "read_plan", "track"]

_MODULES = {
    "Fit": "forecasts", "MemoryCallback": "callback", "fits": "forecasts", "lean": "memory", "track": "memory",
    "plan": "plans", "read_plan": "plans",
}  # fmt: skip


def __getattr__(name: str) -> Any:
    # imports on first use: `import finetune` takes milliseconds, importing torch seconds
    if name not in _MODULES:
        raise AttributeError(f"module 'finetune' has no attribute {name!r}")
    return getattr(import_module(f"finetune.api.{_MODULES[name]}"), name)
