"""Settings of torch's CUDA allocator: expandable segments where the system has them."""

from __future__ import annotations

import platform
import sys


def has_windows_driver() -> bool:
    """Native Windows or WSL: only there the driver falls back to host memory when the card is full."""
    return sys.platform == "win32" or "microsoft" in platform.release().lower()


def expandable_segments() -> bool:
    """Whether a run on this system gets expandable segments: not on native Windows, nor under WSL (pytorch#192330)."""
    return not has_windows_driver()


def allocator_environment() -> dict[str, str]:
    """Return the environment variables that must be set before torch is imported."""
    return {"PYTORCH_ALLOC_CONF": "expandable_segments:True"} if expandable_segments() else {}
