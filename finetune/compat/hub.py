"""The offline switch of huggingface_hub and datasets, as of 2.4.0 and 5.2.0."""

from __future__ import annotations

import sys

from finetune.compat import replace


def set_offline(offline: bool) -> None:
    """Switch huggingface_hub and datasets offline or online."""
    # the libraries read HF_HUB_OFFLINE once, at their import; without a network they would retry for most of a minute
    replace("huggingface_hub.constants.HF_HUB_OFFLINE", offline)
    if "datasets" in sys.modules:
        replace("datasets.config.HF_HUB_OFFLINE", offline)
