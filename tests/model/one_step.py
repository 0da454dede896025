"""A model of a config.json with random weights, and one LoRA step of it in float32 on the CPU."""

import torch

from finetune.compat.trl import add_loss
from finetune.methods import method_of
from finetune.model.adapters import attach_adapters, prepare_for_training, trainable_parameters
from finetune.model.configuration import default_attention
from finetune.model.language_model import attention_by_part, model_class
from finetune.model.techniques import apply_techniques
from finetune.model.transformers_config import config_from
from finetune.recipe import recipe_from
from finetune.settings import resolve_plain

RECIPE = recipe_from({"model_name_or_path": "a/model", "dataset": "rows.jsonl", "dtype": "float32", "packing": False})


def random_model(values, attention, scale=1):
    """The model; with a larger scale of its weights what a token sees changes its loss."""
    config = config_from(values, RECIPE)
    attention = attention_by_part(config, attention)
    torch.manual_seed(0)
    model = model_class(config)._from_config(config, dtype=torch.float32, attn_implementation=attention)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(scale if parameter.dim() > 1 else 1)
    return model


def loss_falls(values):
    """Take an optimizer step on a row; its loss is lower afterwards, or AssertionError is raised."""
    settings = resolve_plain(RECIPE, attn_implementation=default_attention(values), target_modules="all-linear")
    model = attach_adapters(random_model(values, settings.attn_implementation).requires_grad_(False), settings)
    prepare_for_training(model, settings)
    apply_techniques(model, settings)
    add_loss(model)
    tokens = torch.arange(9, 41)[None]
    optimizer = torch.optim.AdamW([parameter for _, parameter in trainable_parameters(model)], lr=1e-2)
    before = method_of(settings).loss(model, {"input_ids": tokens, "labels": tokens}).loss
    before.backward()
    optimizer.step()
    with torch.no_grad():
        after = method_of(settings).loss(model, {"input_ids": tokens, "labels": tokens}).loss
    assert after < before, f"the loss is {before:.3f} before a step and {after:.3f} after it"
