"""Patches of TRL, as of 1.16.0, and faster imports of libraries for a dry run. RunTrainer overrides private methods too."""

from __future__ import annotations

import importlib
import importlib.metadata
import importlib.util
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import cache
from pathlib import Path
from typing import Any

from finetune.compat import replace, wrap
from finetune.compat.bitsandbytes import import_without_compiler

_TILES = "trl.kernels.chunked_logprob"
#: Vocabulary entries in a tile, and TRL's default; such a tile takes up to 512 MiB, also for a smaller vocabulary.
_TILE_WIDTH, _DEFAULT_TILE_WIDTH = "trl.trainer.utils._CHUNKED_LOGPROB_CHUNK_SIZE", 32768
#: Rows of a tile in one operator: 8 MiB in fp32.
_SLICE_ROWS = 64


class _Distributions:
    """Map from packages to distributions, listed only where the names differ."""

    def __init__(self, list_all: Callable[[], Mapping[str, list[str]]]) -> None:
        self._list_all = cache(list_all)

    def __getitem__(self, name: str) -> list[str]:
        try:
            importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            return self._list_all()[name]
        return [name]


def import_without_listing_packages() -> None:
    """Import TRL without listing all installed packages."""
    if "trl" in sys.modules:
        return
    # listing takes 0.2 s of each start
    with wrap("importlib.metadata.packages_distributions", _Distributions):
        importlib.import_module("trl.import_utils")


@contextmanager
def cuda_loss() -> Iterator[None]:
    """Temporarily allocate TRL's loss as on CUDA, without computing."""
    with (
        replace("trl.trainer.utils._use_triton", lambda device: True),  # on trained positions only
        # kernels that work in place where a CPU allocates tensors
        replace(f"{_TILES}._forward_tile", lambda *_, **__: None),
        replace(f"{_TILES}._backward_tile", lambda *_, **__: None),
        replace(f"{_TILES}._addmm_fp32", lambda *_, **__: None),
    ):
        yield


def narrow_tiles(config: Any, *, on_cpu: bool) -> AbstractContextManager[Any]:
    """Temporarily limit CPU tiles of TRL's loss to the vocabulary."""
    # the loss is the same
    width = min(config.get_text_config().vocab_size, _DEFAULT_TILE_WIDTH)
    return replace(_TILE_WIDTH, width) if on_cpu else nullcontext()


def compute_loss_without_triton() -> None:
    """Replace the Triton kernels of TRL's loss, at the same peak memory."""
    # tensors of a tile (4,096 tokens x 32,768 entries) would take 0.5 GiB each, so the operators get _SLICE_ROWS at a time
    replace("trl.trainer.utils._use_triton", lambda device: device.type == "cuda")  # on trained positions only, as with Triton
    replace(f"{_TILES}._use_triton", lambda device: False)
    wrap(f"{_TILES}._forward_tile", _in_slices)
    wrap(f"{_TILES}._backward_tile", _in_slices)


def _in_slices(function: Callable[..., None], tile: Any, stride: int, *args: Any, **kwargs: Any) -> None:
    for start in range(0, len(tile), _SLICE_ROWS):
        rows = slice(start, start + _SLICE_ROWS)
        # tensors have an entry for each row, other arguments hold for all rows
        function(tile[rows], stride, *(value[rows] if hasattr(value, "dim") else value for value in args), **kwargs)


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


# for the dry run, and for checks of a model before training
def add_loss(model: Any) -> None:
    """Patch a transformers model or PeftModel with SFTTrainer's fused head and auxiliary router loss."""
    import_without_listing_packages()
    config = model.config.get_text_config()
    if hasattr(config, "output_router_logits"):
        config.output_router_logits = getattr(config, "router_aux_loss_coef", 0.0) != 0.0
    base = model.get_base_model() if hasattr(model, "get_base_model") else model
    fused_lm_head()(base, outputs=("log_probs", "entropy", "is_top1"))
