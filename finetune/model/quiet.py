"""What the libraries say to each other does not reach the user: progress bars of loading, and deprecations between them."""

from __future__ import annotations

import warnings


def quiet_libraries() -> None:
    """Switch off transformers' and datasets' progress bars, and FutureWarnings, in this process."""
    from datasets import disable_progress_bars
    from transformers.utils import logging

    logging.disable_progress_bar()
    disable_progress_bars()
    warnings.filterwarnings("ignore", category=FutureWarning)
