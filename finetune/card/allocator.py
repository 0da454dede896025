"""Settings of torch's CUDA allocator: set at launch, assumed by the forecast."""

from __future__ import annotations

import platform
import sys


def has_windows_driver(system: str = sys.platform) -> bool:
    """Native Windows or WSL: only there the driver falls back to host memory when the card is full."""
    return system == "win32" or (system == sys.platform and "microsoft" in platform.release().lower())


def expandable_segments(system: str = sys.platform) -> bool:
    """Whether a run on this system gets expandable segments: not on native Windows, nor under WSL (pytorch#192330)."""
    return not has_windows_driver(system)


def allocator_environment() -> dict[str, str]:
    """Environment variables that must be set before torch is imported."""
    return {"PYTORCH_ALLOC_CONF": "expandable_segments:True"} if expandable_segments() else {}
