"""Plain settings, and small models as a run loads them and as a forecast builds them."""

from finetune.model.build import build_base
from finetune.model.transformers_config import config_from, load_config
from finetune.recipe import recipe_from
from finetune.settings import Settings, plainest

SMALL = {
    "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2,
    "vocab_size": 256,
}  # fmt: skip


def settings(name="some/model", **more) -> Settings:
    values = {"model_name_or_path": str(name), "dataset": "rows.jsonl", "lora_r": 4, "lora_alpha": 8, "dtype": "bfloat16"}
    plain = {"load_in_4bit": False, "load_in_8bit": False, "activation_checkpointing": False}
    return plainest(recipe_from({**values, **plain, **more}))


def load(recipe, *, weights=True):
    """The model of the recipe's folder."""
    return build_base(recipe, load_config(recipe), device="cpu", weights=weights)


def on_meta(recipe, values):
    """The model of a config.json with these values."""
    return build_base(recipe, config_from(values, recipe), device="cpu", weights=False)
