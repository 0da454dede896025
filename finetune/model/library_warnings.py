"""Hides the libraries' progress bars and the warnings that the user can do nothing about."""

from __future__ import annotations

import logging
import warnings


def quiet_libraries() -> None:
    """Switch off transformers' and datasets' progress bars, FutureWarnings, and repeats of int8's warning, in this process."""
    from datasets import disable_progress_bars
    from transformers.utils import logging as transformers_logging

    transformers_logging.disable_progress_bar()
    disable_progress_bars()
    warnings.filterwarnings("ignore", category=FutureWarning)
    logger = logging.getLogger("bitsandbytes.autograd._functions")
    if not any(isinstance(existing, _CastToHalfOnce) for existing in logger.filters):
        logger.addFilter(_CastToHalfOnce())


class _CastToHalfOnce(logging.Filter):
    """Lets bitsandbytes say once that int8 casts its inputs to fp16: in bf16 it says so at every layer of every micro-batch."""

    emitted = False

    def filter(self, record: logging.LogRecord) -> bool:
        if not str(record.msg).startswith("MatMul8bitLt: inputs will be cast"):
            return True
        first, self.emitted = not self.emitted, True
        return first
