"""The offline switch of huggingface_hub and datasets."""

from __future__ import annotations

import sys

from finetune.compat.patch_registry import PrivateName, replace

_REASON = "libraries read HF_HUB_OFFLINE once, when they are imported; without a network they would retry for most of a minute"

#: Read in huggingface_hub 2.4.0 and datasets 5.2.0.
PRIVATE_NAMES = (
    PrivateName("huggingface_hub.constants.HF_HUB_OFFLINE", "patch", _REASON, "huggingface_hub.constants.is_offline_mode",
                needs="a hub that does not answer"),
    PrivateName("datasets.config.HF_HUB_OFFLINE", "patch", _REASON,
                "datasets.utils.file_utils._raise_if_offline_mode_is_enabled", needs="a hub that does not answer"),
)  # fmt: skip


def set_offline(offline: bool) -> None:
    """Switch huggingface_hub and datasets offline or online."""
    replace("huggingface_hub.constants.HF_HUB_OFFLINE", offline)
    if "datasets" in sys.modules:
        replace("datasets.config.HF_HUB_OFFLINE", offline)
