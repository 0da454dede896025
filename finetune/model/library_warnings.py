"""Hides the libraries' progress bars and the warnings that the user can do nothing about."""

from __future__ import annotations

import logging
import warnings


def quiet_libraries() -> None:
    """Switch off transformers' and datasets' progress bars, FutureWarnings, and bitsandbytes' warnings, in this process."""
    from datasets import disable_progress_bars
    from transformers.utils import logging as transformers_logging

    transformers_logging.disable_progress_bar()
    disable_progress_bars()
    warnings.filterwarnings("ignore", category=FutureWarning)
    # it suggests a kernel for CPUs at each start, and says at each layer and step that int8 casts bf16 inputs
    logging.getLogger("bitsandbytes").setLevel(logging.ERROR)
