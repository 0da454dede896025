"""Hides the libraries' progress bars and deprecation warnings, which the user can do nothing about."""

from __future__ import annotations

import warnings


def quiet_libraries() -> None:
    """Switch off transformers' and datasets' progress bars, and FutureWarnings, in this process."""
    from datasets import disable_progress_bars
    from transformers.utils import logging

    logging.disable_progress_bar()
    disable_progress_bars()
    warnings.filterwarnings("ignore", category=FutureWarning)
