"""Telemetry and native code from the hub, disabled."""

from __future__ import annotations

import os
import sys

#: Without these, the hub's client also fetches a list of agents and sends the versions of libraries.
SETTINGS = {"HF_HUB_DISABLE_TELEMETRY": "1", "DO_NOT_TRACK": "1", "USE_HUB_KERNELS": "0"}


def keep_private() -> None:
    """Disable telemetry and the package `kernels`."""
    os.environ.update(SETTINGS)
    # libraries load native code from the hub with `kernels`; bitsandbytes does so when imported on a CPU, and has no option
    sys.modules["kernels"] = None  # type: ignore[assignment]  # importing it raises ModuleNotFoundError
