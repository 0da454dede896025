"""Plain settings, and small models as a run loads them and as a forecast builds them."""

import json

import torch
from safetensors.torch import load_file, save_file

from finetune.model.build import build_base
from finetune.model.transformers_config import config_from, load_config
from finetune.recipe import recipe_from
from finetune.settings import Settings, resolve_plain

SMALL = {
    "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2,
    "vocab_size": 256,
}  # fmt: skip


def settings(name="some/model", **more) -> Settings:
    values = {"model_name_or_path": str(name), "dataset": "rows.jsonl", "lora_r": 4, "lora_alpha": 8, "dtype": "bfloat16"}
    plain = {"load_in_4bit": False, "load_in_8bit": False, "activation_checkpointing": False}
    return resolve_plain(recipe_from({**values, **plain, **more}))


def load(recipe, *, weights=True):
    """The model of the recipe's folder."""
    return build_base(recipe, load_config(recipe), device="cpu", weights=weights)


def on_meta(recipe, values):
    """The model of a config.json with these values."""
    return build_base(recipe, config_from(values, recipe), device="cpu", weights=False)


def store_as_fp8(folder):
    """Store a saved model's linear layers as FP8, in blocks of 16 x 16."""
    tensors = {}
    for name, weight in load_file(folder / "model.safetensors").items():
        if "proj" in name:
            blocks = weight.view(weight.shape[0] // 16, 16, weight.shape[1] // 16, 16).float()
            scales = blocks.abs().amax((1, 3)) / 448
            tensors[f"{name}_scale_inv"] = scales
            weight = (blocks / scales[:, None, :, None]).view(weight.shape).to(torch.float8_e4m3fn)
        tensors[name] = weight
    store(folder, tensors, {"quant_method": "fp8", "activation_scheme": "dynamic", "weight_block_size": [16, 16]})


def store_as_mxfp4(folder):
    """Store a saved gpt-oss's experts as mxfp4, with random values."""
    tensors = {}
    for name, weight in load_file(folder / "model.safetensors").items():
        if name.endswith(("experts.gate_up_proj", "experts.down_proj")):
            experts, inputs, outputs = weight.shape
            tensors[f"{name}_blocks"] = torch.randint(256, (experts, outputs, inputs // 32, 16), dtype=torch.uint8)
            tensors[f"{name}_scales"] = torch.randint(118, 124, (experts, outputs, inputs // 32), dtype=torch.uint8)
        else:
            tensors[name] = weight
    store(
        folder, tensors, {"quant_method": "mxfp4", "modules_to_not_convert": ["self_attn", "router", "embed_tokens", "lm_head"]}
    )


def store(folder, tensors, quantisation):
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    values = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**values, "quantization_config": quantisation}))
