"""Settings of torch's CUDA allocator."""

from __future__ import annotations

import platform
import sys


def has_windows_driver() -> bool:
    """Tell whether this is Windows or WSL."""
    # the only drivers that fall back to host memory when the GPU is full
    return sys.platform == "win32" or "microsoft" in platform.release().lower()


def expandable_segments() -> bool:
    """Tell whether a run here gets expandable segments."""
    return not has_windows_driver()  # neither on native Windows, nor under WSL (pytorch#192330)


def allocator_environment() -> dict[str, str]:
    """Return the environment variables to set before importing torch."""
    return {"PYTORCH_ALLOC_CONF": "expandable_segments:True"} if expandable_segments() else {}
