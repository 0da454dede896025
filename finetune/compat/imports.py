"""Faster imports of libraries for a dry run, as of transformers 5.23.0 and TRL 1.16.0."""

from __future__ import annotations

import importlib
import importlib.util
import sys
from pathlib import Path
from typing import Any

from finetune.compat.bitsandbytes import import_without_compiler
from finetune.compat.patch_registry import wrap

_SCAN = "transformers.utils.import_utils.create_import_structure_from_path"


# saves about a second of a cold plan
def import_libraries() -> None:
    """Import bitsandbytes and transformers.models."""
    import_without_compiler()
    if "transformers.models" in sys.modules:
        return
    # the scan is cached by path: transformers scans the folder, transformers.models its __init__.py, with the same result
    with wrap(_SCAN, lambda scan, path: scan(Path(path).parent if Path(path).is_file() else path)):
        importlib.import_module("transformers.models")


def fused_lm_head() -> Any:
    """Return TRL's `add_fused_lm_head` without importing pandas and datasets."""
    # these check whether pandas and datasets are installed, so import them before the placeholders exist
    import transformers  # noqa: F401
    import trl.kernels.chunked_logprob
    import trl.trainer.model_config  # noqa: F401

    # trl.trainer.utils uses these classes in annotations only
    class_names = {"pandas": "DataFrame", "datasets": "IterableDataset"}
    absent = [name for name in class_names if name not in sys.modules]
    for name in absent:
        placeholder = importlib.util.module_from_spec(importlib.util.find_spec(name))  # type: ignore[arg-type]
        setattr(placeholder, class_names[name], object)
        sys.modules[name] = placeholder
    try:
        from trl.trainer.utils import add_fused_lm_head
    finally:
        for name in absent:
            del sys.modules[name]
    return add_fused_lm_head
