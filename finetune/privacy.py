"""Telemetry and native code from the hub, disabled."""

from __future__ import annotations

import os
import sys

#: The hub's client would also ask for a list of agents and send versions.
SETTINGS = {"HF_HUB_DISABLE_TELEMETRY": "1", "DO_NOT_TRACK": "1", "USE_HUB_KERNELS": "0"}


def keep_private() -> None:
    """Disable telemetry and the package `kernels`."""
    os.environ.update(SETTINGS)
    # libraries load native code from the hub with `kernels`: bitsandbytes does when it is imported on a CPU, without a switch
    sys.modules["kernels"] = None  # type: ignore[assignment]  # importing it raises ModuleNotFoundError
