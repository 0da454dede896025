"""Writes a model folder of a given shape with random weights: real sizes (1B-14B) without a hub.

    python benchmarks/gpu/make_model.py Qwen/Qwen2.5-7B-Instruct /tmp/shape-7b

The shape is a name in the packaged catalogue or the path of a config.json. Weights are written in bf16, one shard at a time, so
that the host needs memory for one shard only. The tokenizer is the bundled one: its 640 ids are in every model's vocabulary.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

SHARD_BYTES = 2 * 2**30


def make_model(shape: str, folder: Path, layers: int | None = None, seed: int = 0) -> dict[str, Any]:
    """Write config.json, safetensors shards with their index, and tokenizer files. Returns the configuration."""
    import torch
    from safetensors.torch import save_file
    from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

    from finetune.bundled import model_path

    values = read_shape(shape)
    if layers:
        values["num_hidden_layers"] = layers
        if values.get("layer_types"):
            values["layer_types"] = values["layer_types"][:layers]
    folder.mkdir(parents=True, exist_ok=True)
    config = AutoConfig.for_model(**{**values, "dtype": "bfloat16"})
    config.save_pretrained(folder)
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    tied = set(model.all_tied_weights_keys) if hasattr(model, "all_tied_weights_keys") else set()
    torch.manual_seed(seed)
    index: dict[str, str] = {}
    shard: dict[str, Any] = {}
    number = 1

    def flush() -> None:
        nonlocal shard, number
        if shard:
            save_file(shard, folder / f"model-{number:05d}.safetensors", metadata={"format": "pt"})
            shard, number = {}, number + 1

    for name, parameter in model.state_dict().items():
        if name in tied:
            continue
        is_norm = parameter.dim() == 1
        fresh = torch.ones(parameter.shape) if is_norm else torch.empty(parameter.shape, dtype=torch.bfloat16).normal_(0, 0.02)
        shard[name] = fresh.to(torch.bfloat16)
        index[name] = f"model-{number:05d}.safetensors"
        if sum(tensor.nbytes for tensor in shard.values()) > SHARD_BYTES:
            flush()
    flush()
    total = sum(path.stat().st_size for path in folder.glob("model-*.safetensors"))
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {"total_size": total}, "weight_map": index}))
    AutoTokenizer.from_pretrained(str(model_path("tiny"))).save_pretrained(folder)
    return values


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
