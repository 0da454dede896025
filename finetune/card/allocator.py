"""Settings of torch's CUDA allocator: set at launch."""

from __future__ import annotations

import platform
import sys
from dataclasses import asdict, dataclass


@dataclass(frozen=True)
class AllocatorSettings:
    """Settings by their names in PYTORCH_ALLOC_CONF; what is false or 0 is torch's default.

    `roundup_power2_divisions`: sizes are rounded up to so many parts of a power of two. `max_split_size_mb`: larger blocks are
    not split. `garbage_collection_threshold`: the share of the run's limit from which on old segments are freed before a new
    one is made.
    """

    expandable_segments: bool = False
    roundup_power2_divisions: int = 0
    max_split_size_mb: int = 0
    garbage_collection_threshold: float = 0.0

    def environment(self) -> dict[str, str]:
        """Environment variables that must be set before torch is imported."""
        values = {name: value for name, value in asdict(self).items() if value}
        return {"PYTORCH_ALLOC_CONF": ",".join(f"{name}:{value}" for name, value in values.items())} if values else {}


def has_windows_driver() -> bool:
    """Native Windows or WSL: only there the driver falls back to host memory when the card is full."""
    return sys.platform == "win32" or "microsoft" in platform.release().lower()


def expandable_segments() -> bool:
    """Whether a run on this system gets expandable segments: not on native Windows, nor under WSL (pytorch#192330)."""
    return not has_windows_driver()


def usual_settings() -> AllocatorSettings:
    """The settings on this system."""
    return AllocatorSettings(expandable_segments=expandable_segments())
