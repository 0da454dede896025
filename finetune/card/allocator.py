"""Settings of torch's CUDA allocator: set at launch, assumed by the forecast."""

from __future__ import annotations

import platform
import sys


def expandable_segments(system: str = sys.platform) -> bool:
    """Whether a run on this system gets expandable segments: not on native Windows, nor under WSL (pytorch#192330)."""
    return system != "win32" and not (system == sys.platform and "microsoft" in platform.release().lower())


def allocator_environment() -> dict[str, str]:
    """Environment variables that must be set before torch is imported."""
    return {"PYTORCH_ALLOC_CONF": "expandable_segments:True"} if expandable_segments() else {}
