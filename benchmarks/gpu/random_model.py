"""A model of a given shape with random weights, and its rows: real sizes without a hub, in seconds.

The shape is a name of the packaged catalogue or the path of a config.json. One random buffer is repeated over all matrices,
each from another offset; norms are one, biases zero. The tokenizer is the bundled one: its 640 ids are in every model's
vocabulary.
"""

from __future__ import annotations

import json
from pathlib import Path

from standin_gpu.sparse_model import write_sparse_model

#: Values of the random buffer; a draw takes 20 ns a value, a copy a tenth of a nanosecond.
BUFFER_VALUES = 2**25


def make_model(shape: str, folder: Path, layers: int | None = None) -> None:
    """Write config.json, weights in bf16 and the tokenizer's files."""
    from finetune.bundled import model_path
    from finetune.model.configuration import read_config
    from finetune.recipe import recipe_from

    path = Path(shape)
    recipe = recipe_from({"model_name_or_path": shape, "dataset": "none"})
    values = json.loads(path.read_text(encoding="utf-8")) if path.is_file() else dict(read_config(recipe))
    if layers:
        values["num_hidden_layers"] = layers
        if values.get("layer_types"):
            values["layer_types"] = values["layer_types"][:layers]
    write_sparse_model(folder, values, Path(model_path("tiny")))
    for number, path in enumerate(sorted(folder.glob("*.safetensors"))):
        _fill(path, number)


def _fill(path: Path, seed: int) -> None:
    """Give the tensors of a safetensors file values: the length of the header, the header, the tensors' bytes."""
    import torch

    generator = torch.Generator().manual_seed(seed)
    random = torch.empty(BUFFER_VALUES, dtype=torch.bfloat16).normal_(0, 0.02, generator=generator)
    buffer = memoryview(random.view(torch.uint8).numpy())
    with path.open("r+b") as file:
        header = json.loads(file.read(int.from_bytes(file.read(8), "little")))
        begin = file.tell()
        del header["__metadata__"]
        for number, (name, tensor) in enumerate(header.items()):
            start, end = tensor["data_offsets"]
            file.seek(begin + start)
            if len(tensor["shape"]) == 1:
                value = torch.full(tensor["shape"], 1.0 if "norm" in name else 0.0, dtype=torch.bfloat16)
                file.write(value.view(torch.uint8).numpy())
                continue
            left, offset = end - start, 2 * 9973 * number % len(buffer)
            while left:
                piece = buffer[offset : offset + left]
                file.write(piece)
                left, offset = left - len(piece), 0


def write_rows(path: Path, longest: int, count: int, documents: int = 1) -> None:
    """Write `count` rows of `longest` / 2 to `longest` tokens with EOS; for packing, rows of `longest` / `documents` tokens."""
    from transformers import AutoTokenizer

    from finetune.bundled import model_path

    tokenizer = AutoTokenizer.from_pretrained(str(model_path("tiny")))
    digits = "".join(str(number % 10) for number in range(2 * longest))
    offsets = tokenizer(digits, add_special_tokens=False, return_offsets_mapping=True)["offset_mapping"]
    with path.open("w", encoding="utf-8") as file:
        for number in range(count):
            tokens = longest // documents if documents > 1 else longest - number * 37 % 64 * longest // 128
            file.write(json.dumps({"text": digits[: offsets[tokens - 2][1]]}) + "\n")
