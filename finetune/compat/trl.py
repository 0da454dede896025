"""Private names of TRL, some overridden in `finetune.run.training.RunTrainer`."""

from __future__ import annotations

import importlib
import importlib.metadata
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from functools import cache
from typing import Any

from finetune.compat.patch_registry import PrivateName, replace, wrap

_TILES = "trl.kernels.chunked_logprob"
#: Vocabulary entries in a tile, and TRL's default; such a tile takes up to 512 MiB, also for a smaller vocabulary.
_TILE_WIDTH, _DEFAULT_TILE_WIDTH = "trl.trainer.utils._CHUNKED_LOGPROB_CHUNK_SIZE", 32768
#: Rows of a tile in one operator: 8 MiB in fp32.
_SLICE_ROWS = 64

#: Read in TRL 1.16.0.
PRIVATE_NAMES = (
    PrivateName("importlib.metadata.packages_distributions", "patch",
                "TRL lists the files of every installed package at its import", needs="a process that has not imported TRL"),
    PrivateName("trl.trainer.utils._use_triton", "patch", "on a card the loss is computed on trained positions only",
                "trl.trainer.utils.add_fused_lm_head", "device"),
    PrivateName(_TILE_WIDTH, "patch", "on a CPU a tile of the loss is no wider than the vocabulary",
                "trl.trainer.utils.add_fused_lm_head"),
    PrivateName(f"{_TILES}._use_triton", "patch", "a card without a compiler computes the loss with torch's operators",
                f"{_TILES}.ChunkedLogProbFunction.forward", "device"),
    PrivateName(f"{_TILES}._forward_tile", "patch", "a Triton kernel that works in place where a CPU allocates tensors",
                f"{_TILES}.ChunkedLogProbFunction.forward"),
    PrivateName(f"{_TILES}._backward_tile", "patch", "a Triton kernel that works in place where a CPU allocates tensors",
                f"{_TILES}.ChunkedLogProbFunction.backward"),
    PrivateName(f"{_TILES}._addmm_fp32", "patch", "a GEMM that adds in place where a CPU allocates the product",
                f"{_TILES}.ChunkedLogProbFunction.backward", "acc a b"),
    PrivateName("trl.trainer.utils.add_fused_lm_head", "private call", "a dry run computes the loss that SFTTrainer computes",
                "trl.trainer.sft_trainer.SFTTrainer.__init__"),
    PrivateName("trl.SFTTrainer._save_checkpoint", "override", "checkpoints are written to a temporary folder, then renamed",
                "transformers.Trainer._maybe_log_save_evaluate", "self model trial"),
    PrivateName("trl.SFTTrainer.create_model_card", "override", "TRL writes a model card into each checkpoint's parent",
                "trl.SFTTrainer._save_checkpoint", "self model_name dataset_name tags"),
    PrivateName("trl.SFTTrainer._get_train_sampler", "override", "the longest rows come early; resuming finds the same order",
                "transformers.Trainer.get_train_dataloader", "self train_dataset"),
    PrivateName("trl.SFTTrainer._get_output_dir", "override", "checkpoints are written to a temporary folder",
                "transformers.Trainer._save_checkpoint", "self trial"),
    PrivateName("trl.SFTTrainer.compute_loss", "override", "TRL reads five numbers from the device after each forward pass",
                "transformers.Trainer.training_step", "self model inputs return_outputs num_items_in_batch"),
    PrivateName("trl.SFTTrainer.training_step", "override", "counts tokens, and offloads or quantises saved activations",
                "transformers.Trainer._run_epoch"),
    PrivateName("trl.SFTTrainer.evaluate", "override", "evaluation is a separate phase in the events",
                "transformers.Trainer._evaluate"),
)  # fmt: skip


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
    with ExitStack() as stack:
        stack.enter_context(replace("trl.trainer.utils._use_triton", lambda device: True))
        for tile in ("_forward_tile", "_backward_tile", "_addmm_fp32"):
            stack.enter_context(replace(f"{_TILES}.{tile}", lambda *_, **__: None))
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
    for tile in ("_forward_tile", "_backward_tile"):
        wrap(f"{_TILES}.{tile}", _in_slices)


def _in_slices(function: Callable[..., None], tile: Any, stride: int, *args: Any, **kwargs: Any) -> None:
    for start in range(0, len(tile), _SLICE_ROWS):
        rows = slice(start, start + _SLICE_ROWS)
        # tensors have an entry for each row, other arguments hold for all rows
        function(tile[rows], stride, *(value[rows] if hasattr(value, "dim") else value for value in args), **kwargs)
