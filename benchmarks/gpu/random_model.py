"""A model folder of a given shape with random weights: real sizes without a hub, in seconds.

    python -m benchmarks.gpu.random_model Qwen/Qwen2.5-7B-Instruct /dev/shm/shape-7b [LAYERS]

The shape is a name of the packaged catalogue or the path of a config.json. One random buffer is repeated over all matrices,
each from another offset; norms are one, biases zero. The tokenizer is the bundled one: its 640 ids are in every model's
vocabulary.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

#: Values of the random buffer; a draw takes 20 ns a value, a copy a tenth of a nanosecond.
BUFFER_VALUES = 2**25


def make_model(shape: str, folder: Path, layers: int | None = None) -> dict[str, Any]:
    """Write config.json, model.safetensors in bf16 and the tokenizer's files. Returns the configuration."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

    from finetune.bundled import model_path

    values = read_shape(shape)
    if layers:
        values["num_hidden_layers"] = layers
        if values.get("layer_types"):
            values["layer_types"] = values["layer_types"][:layers]
    folder.mkdir(parents=True, exist_ok=True)
    config = AutoConfig.for_model(**{**values, "dtype": "bfloat16"})
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    config.architectures = [type(model).__name__]
    config.save_pretrained(folder)
    tied = set(model.all_tied_weights_keys)
    sizes = {name: list(tensor.shape) for name, tensor in model.state_dict().items() if name not in tied}
    _write(folder / "model.safetensors", sizes)
    AutoTokenizer.from_pretrained(str(model_path("tiny"))).save_pretrained(folder)
    return values


def _write(path: Path, shapes: dict[str, list[int]]) -> None:
    """A safetensors file: the length of the header, the header, the tensors' bytes."""
    import torch

    generator = torch.Generator().manual_seed(0)
    random = torch.empty(BUFFER_VALUES, dtype=torch.bfloat16).normal_(0, 0.02, generator=generator)
    buffer = memoryview(random.view(torch.uint8).numpy())
    sizes = {name: 2 * torch.Size(shape).numel() for name, shape in shapes.items()}
    header, end = {}, 0
    for name, shape in shapes.items():
        header[name] = {"dtype": "BF16", "shape": shape, "data_offsets": [end, end + sizes[name]]}
        end += sizes[name]
    text = json.dumps({"__metadata__": {"format": "pt"}, **header}).encode()
    with path.open("wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        for number, (name, shape) in enumerate(shapes.items()):
            if len(shape) == 1:
                value = 1.0 if "norm" in name else 0.0
                file.write(torch.full(shape, value, dtype=torch.bfloat16).view(torch.uint8).numpy())
                continue
            left, start = sizes[name], 2 * 9973 * number % len(buffer)
            while left:
                piece = buffer[start : start + left]
                file.write(piece)
                left, start = left - len(piece), 0


def read_shape(shape: str) -> dict[str, Any]:
    """The values of a config.json, from a file or from the packaged catalogue."""
    path = Path(shape)
    if path.is_file():
        return dict(json.loads(path.read_text()))
    from finetune.model.configuration import read_config
    from finetune.recipe import recipe_from

    return dict(read_config(recipe_from({"model_name_or_path": shape, "dataset": "none"})))


if __name__ == "__main__":
    made = make_model(sys.argv[1], Path(sys.argv[2]), *(int(argument) for argument in sys.argv[3:4]))
    print(f"{sys.argv[2]}: {made['model_type']}, {made['num_hidden_layers']} layers")
