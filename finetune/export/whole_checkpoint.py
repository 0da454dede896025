"""A copy of a model folder with some tensors replaced: all other bytes and files stay as they are."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import TYPE_CHECKING, Any

from finetune.errors import CommandError

if TYPE_CHECKING:
    import torch

#: Weights in other formats, which would keep their old values beside the merged ones.
OTHER_WEIGHTS = {".bin", ".pt", ".pth", ".ckpt", ".gguf", ".h5", ".msgpack", ".onnx", ".ot", ".tflite"}


def write_merged_checkpoint(model: Any, source: Path, target: Path) -> list[str]:
    """Copy the folder `source` to `target` with the tensors that differ in `model`; returns their names in the files.

    `model`: loaded by transformers from `source`, then changed. Raises RecipeError when a tensor of it has no place there.
    """
    from transformers.core_model_loading import revert_weight_conversion

    target.mkdir(parents=True)
    tensors: dict[str, torch.Tensor] = dict(model.state_dict())
    for tied in getattr(model, "all_tied_weights_keys", {}):
        tensors.pop(tied, None)
    left = revert_weight_conversion(model, tensors)
    changed = []
    for path in sorted(source.iterdir()):
        if path.suffix == ".safetensors":
            shutil.copyfile(path, target / path.name)
            changed += _replace_changed(target / path.name, left)
        elif path.is_file() and path.suffix not in OTHER_WEIGHTS:
            shutil.copyfile(path, target / path.name)
    if left:
        raise CommandError(
            f"{source} has no tensor {next(iter(left))} ({len(left)} such), so the merged model can't be written in its form",
            "Use the adapter without merging: servers can load base + adapter.",
        )
    return changed


def _replace_changed(path: Path, left: dict[str, torch.Tensor]) -> list[str]:
    """Overwrite in a safetensors file what differs from `left`, and take from `left` what the file has."""
    import torch
    from safetensors import safe_open

    changed: dict[str, bytes] = {}
    with safe_open(path, framework="pt") as file:
        for name in file.keys():  # noqa: SIM118 - not a dictionary
            if name not in left:
                continue
            new, old = left.pop(name), file.get_tensor(name)
            if new.shape != old.shape:
                raise CommandError(f"{path.name}: {name} has shape {tuple(old.shape)}, merged {tuple(new.shape)}")
            if not torch.equal(old.to(new.dtype), new):
                changed[name] = new.to(old.dtype).contiguous().view(-1).view(torch.uint8).numpy().tobytes()
    with path.open("r+b") as writing:
        length = int.from_bytes(writing.read(8), "little")
        header = json.loads(writing.read(length))
        for name, data in changed.items():
            begin, end = header[name]["data_offsets"]
            assert end - begin == len(data)
            writing.seek(8 + length + begin)
            writing.write(data)
    return list(changed)
