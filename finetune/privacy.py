"""What every process of this program switches off before it imports a library: telemetry, and native code from the hub."""

from __future__ import annotations

import os
import sys

#: Switches of the hub's client (which also asks for a list of agents and sends versions), of transformers, and of others.
SETTINGS = {"HF_HUB_DISABLE_TELEMETRY": "1", "DO_NOT_TRACK": "1", "USE_HUB_KERNELS": "0"}


def keep_private() -> None:
    """Switch telemetry off and make the package `kernels`, with which libraries load native code from the hub, unimportable.

    bitsandbytes asks for such code when it is imported on a CPU, and nothing else switches that off.
    """
    os.environ.update(SETTINGS)
    sys.modules["kernels"] = None  # type: ignore[assignment]  # importing it raises ModuleNotFoundError
