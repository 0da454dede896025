"""Libraries' progress bars and warnings that a user can't act on."""

from __future__ import annotations

import logging
import warnings

from datasets import disable_progress_bars
from transformers.utils import logging as transformers_logging


def quiet_libraries() -> None:
    """Hide progress bars, FutureWarnings and bitsandbytes' warnings in this process."""
    transformers_logging.disable_progress_bar()
    disable_progress_bars()
    warnings.filterwarnings("ignore", category=FutureWarning)
    # it suggests a kernel for CPUs at each start, and says at each layer and step that int8 casts bf16 inputs
    logging.getLogger("bitsandbytes").setLevel(logging.ERROR)
