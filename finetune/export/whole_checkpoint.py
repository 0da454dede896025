"""A copy of a model folder with some tensors replaced; all other bytes and files are unchanged."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import TYPE_CHECKING, Any

from finetune.errors import CommandError
from finetune.files import read_safetensors_header

if TYPE_CHECKING:
    import torch

#: Weights in other formats, which would still have their old values.
OTHER_WEIGHTS = {".bin", ".pt", ".pth", ".ckpt", ".gguf", ".h5", ".msgpack", ".onnx", ".ot", ".tflite"}


def write_merged_checkpoint(model: Any, source: Path, target: Path) -> list[str]:
    """Copy the folder `source` to `target` with the tensors that differ in `model`; returns their names in the files.

    `model`: loaded by transformers from `source`, then changed. Raises CommandError if `source` lacks one of its tensors.
    """
    from transformers.core_model_loading import revert_weight_conversion

    target.mkdir(parents=True)
    tensors: dict[str, torch.Tensor] = dict(model.state_dict())
    for name in getattr(model, "all_tied_weights_keys", {}):
        tensors.pop(name, None)
    remaining = revert_weight_conversion(model, tensors)
    changed = []
    for path in sorted(source.iterdir()):
        if path.suffix == ".safetensors":
            shutil.copyfile(path, target / path.name)
            changed += _replace_changed(target / path.name, remaining)
        elif path.is_file() and path.suffix not in OTHER_WEIGHTS:
            shutil.copyfile(path, target / path.name)
    if remaining:
        missing = f"{next(iter(remaining))} ({len(remaining)} such)"
        raise CommandError(
            f"{source} has no tensor {missing}, so the merged model can't be written in its form",
            "Use the adapter without merging: servers can load base + adapter.",
        )
    return changed


def _replace_changed(path: Path, remaining: dict[str, torch.Tensor]) -> list[str]:
    """Overwrite the tensors of a safetensors file that differ from `remaining`, and remove the file's tensors from it."""
    import torch
    from safetensors import safe_open

    changed: dict[str, bytes] = {}
    with safe_open(path, framework="pt") as file:
        for name in file.keys():  # noqa: SIM118 - not a dictionary
            if name not in remaining:
                continue
            new, old = remaining.pop(name), file.get_tensor(name)
            if new.shape != old.shape:
                raise CommandError(f"{path.name}: {name} has shape {tuple(old.shape)}, merged {tuple(new.shape)}")
            if not torch.equal(old.to(new.dtype), new):
                changed[name] = new.to(old.dtype).contiguous().view(-1).view(torch.uint8).numpy().tobytes()
    with path.open("r+b") as output:
        header, data_begin = read_safetensors_header(output)
        for name, data in changed.items():
            begin, end = header[name]["data_offsets"]
            assert end - begin == len(data)
            output.seek(data_begin + begin)
            output.write(data)
    return list(changed)
