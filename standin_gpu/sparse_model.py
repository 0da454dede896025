"""A model whose weights are zeros that take no space on the disk. 70B takes seconds.

Copies above the copy limit never reach the stand-in GPU, so the weights are never read.
"""

import json
import math
import shutil
from pathlib import Path

TOKENIZER_FILES = ("tokenizer*", "special_tokens*", "chat_template*", "vocab*", "merges*")
#: Bytes of a file of weights, as of models on the hub.
FILE_BYTES = 5 * 10**9


def write_sparse_model(folder: Path, values: dict, tokenizer: Path) -> int:
    """Write config.json, tokenizer and weights of the model with these values of its config.json; returns the weights' bytes.

    Weights are bfloat16, in files of up to FILE_BYTES: the kernel refuses to map a file that is larger than the host's memory.
    `tokenizer`: folder of a tokenizer, which may have fewer tokens than the model.
    """
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForImageTextToText, AutoTokenizer

    folder.mkdir(parents=True, exist_ok=True)
    for pattern in TOKENIZER_FILES:
        for file in tokenizer.glob(pattern):
            shutil.copy(file, folder / file.name)
    tokens = AutoTokenizer.from_pretrained(folder)
    special = {"bos_token_id": tokens.bos_token_id, "eos_token_id": tokens.eos_token_id, "pad_token_id": tokens.pad_token_id}
    values = {**values, **special, "dtype": "bfloat16"}
    config = AutoConfig.for_model(values.pop("model_type"), **values)
    whole = type(config) in AutoModelForImageTextToText._model_mapping  # with the parts for pictures, as a hub's checkpoint
    with torch.device("meta"):
        model = (AutoModelForImageTextToText if whole else AutoModelForCausalLM).from_config(config, dtype=torch.bfloat16)
    config.architectures = [type(model).__name__]
    config.save_pretrained(folder)
    (folder / "generation_config.json").write_text(json.dumps(special), encoding="utf-8")
    tied = set(getattr(model, "_tied_weights_keys", None) or {}) if config.get_text_config().tie_word_embeddings else set()
    shapes = {name: list(tensor.shape) for name, tensor in model.state_dict().items() if name not in tied}
    return write_sparse_weights(folder, shapes)


def write_sparse_weights(folder: Path, shapes: dict[str, list[int]]) -> int:
    """model.safetensors, or several files with their index; returns the weights' bytes."""
    parts: list[dict[str, list[int]]] = [{}]
    size = 0
    for name, shape in shapes.items():
        tensor_bytes = 2 * math.prod(shape)
        if parts[-1] and size + tensor_bytes > FILE_BYTES:
            parts.append({})
            size = 0
        parts[-1][name] = shape
        size += tensor_bytes
    if len(parts) == 1:
        return write_sparse_safetensors(folder / "model.safetensors", shapes)
    names = [f"model-{number:05}-of-{len(parts):05}.safetensors" for number in range(1, len(parts) + 1)]
    total = sum(write_sparse_safetensors(folder / file, part) for file, part in zip(names, parts, strict=True))
    weight_map = {name: file for file, part in zip(names, parts, strict=True) for name in part}
    index = {"metadata": {"total_size": total}, "weight_map": weight_map}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index), encoding="utf-8")
    return total


def write_sparse_safetensors(path: Path, shapes: dict[str, list[int]]) -> int:
    """A safetensors file of bfloat16 zeros, without blocks on the disk; returns its bytes."""
    header: dict = {"__metadata__": {"format": "pt"}}
    end = 0
    for name, shape in shapes.items():
        size = 2 * math.prod(shape)
        header[name] = {"dtype": "BF16", "shape": shape, "data_offsets": [end, end + size]}
        end += size
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    with path.open("wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        file.truncate(8 + len(text) + end)
    return end
