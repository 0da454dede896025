"""The size of a model: parameters by kind, counted on the meta device."""

from __future__ import annotations

import re
from dataclasses import dataclass, field, fields
from typing import Any

from finetune.memory import cache
from finetune.settings import AUTO, Recipe, resolve_plain, resolved
from finetune.settings.base_formats import BaseFormat

#: Configuration names of the experts per token.
_USED = ("num_experts_per_tok", "top_k_experts")
#: Names in `layer_types`, which transformers 5.23 sets for every hybrid: layers without attention, with a state, with a window.
#: A `hybrid` layer has attention and a state (Falcon-H1, Zamba 2).
_WITHOUT_ATTENTION = {"linear_attention", "conv", "mlp", "moe"}
_WITH_STATE = {"linear_attention", "conv", "hybrid", "hybrid_sliding"}
_WINDOWED = {"sliding_attention", "chunked_attention", "hybrid_sliding"}
#: Sizes of a gated delta net and of a Mamba-2 mixer, as transformers' modules name them.
DELTA_NET = ("num_v_heads", "head_k_dim", "head_v_dim")
MAMBA2 = ("num_heads", "head_dim", "ssm_state_size", "chunk_size")


@dataclass(frozen=True)
class ModelShape:
    """Parameter counts, and the widths that speed and advice need."""

    family: str
    parameters: int
    #: Weights of linear layers, which 4-bit and 8-bit formats quantise.
    linear: int
    #: A mixture's fused experts.
    expert: int
    #: The output layer.
    head: int
    #: Sum of inputs and outputs over the linear layers.
    linear_width: int
    #: Adapter parameters at rank 1.
    adapter_per_rank: int
    #: Layers, or stacks of experts, with an adapter.
    adapters: int
    layers: int
    hidden: int
    attention_width: int
    heads: int  # of an attention layer
    max_positions: int | None = None
    experts: int = 0
    experts_used: int = 0
    #: Experts that 4-bit formats quantise.
    expert_4bit: int = 0
    targets: str | list[str] = "all-linear"  # `target_modules` of `auto`
    table: int = 0  # the input embedding, where the output layer does not share it
    #: Layers without attention, with a sliding window, and with a state passed from token to token.
    unattended: int = 0
    windowed: int = 0
    stateful: int = 0
    window: int = 0
    #: Sizes of a gated delta net or Mamba-2 mixer, by the names in DELTA_NET or MAMBA2, and number of mixers.
    mixer: dict[str, int] = field(default_factory=dict)
    mixers: int = 0

    @property
    def attended(self) -> int:
        return self.layers - self.unattended

    @property
    def computed(self) -> float:
        """Parameters used per token in the layers, active experts only."""
        return self.linear + (self.expert * self.experts_used / self.experts if self.experts else self.expert)

    @property
    def layer_width(self) -> float:
        """Inputs and outputs of one layer's linear layers, active experts only."""
        return self.linear_width / self.layers + self.experts_used * 3 * (self.hidden + self.expert_inner)

    @property
    def expert_inner(self) -> float:
        """Rows of an expert's down projection."""
        # an expert has gate, up and down weights, each of hidden x inner
        return self.expert / (self.layers * self.experts * 3 * self.hidden) if self.experts else 0.0

    def used_share(self, tokens: float) -> float:
        """Return the expected share of experts used by `tokens` tokens."""
        # assumes that all experts are equally likely
        return 1 - (1 - self.experts_used / self.experts) ** tokens if self.experts else 1.0

    @property
    def billions(self) -> str:
        return f"{self.parameters / 1e9:.1f}B" if self.parameters >= 0.95e9 else f"{self.parameters / 1e6:.0f}M"

    def weight_bytes(self, base: BaseFormat) -> int:
        return self._bytes(self.parameters, base)

    def layer_bytes(self, base: BaseFormat) -> int:
        return self._bytes(self.linear + self.expert, base) // self.layers

    def quantisable(self, base: BaseFormat) -> int:
        return self.linear + (self.expert_4bit if base.experts else 0)

    def _bytes(self, parameters: int, base: BaseFormat) -> int:
        quantised = self.quantisable(base)
        return round(quantised * base.weight_bytes + (parameters - quantised) * base.other_bytes)


def shape_of(config: dict[str, Any], recipe: Recipe) -> ModelShape:
    """Return the shape of a config.json's model. Raises RecipeError."""
    values = {name: value for name, value in config.items() if name != "quantization_config"}  # the modules are the same
    counts = [count.name for count in fields(ModelShape)]
    key = cache.key_of(
        kind="shape", counts=counts, config=values, targets=recipe.target_modules,
        own_code=recipe.trust_remote_code and (recipe.model_name_or_path, recipe.model_revision),
        vision=recipe.vision is True and recipe.train_vision,
    )  # fmt: skip
    # counting takes 0.3 s for an 8B model, and imports torch
    return cache.cached(key, ModelShape, lambda: _count(values, recipe))


def _count(values: dict[str, Any], recipe: Recipe) -> ModelShape:
    import torch

    from finetune.compat.trl import import_libraries

    import_libraries()
    from finetune.layers.experts import EXPERT_COUNTS, adapts_experts, fused_experts, packable_experts
    from finetune.layers.layer_offloading import offloadable_embedding
    from finetune.model.adapters import attach_adapters, trainable_parameters
    from finetune.model.build import build_on_meta
    from finetune.model.language_model import text_config
    from finetune.model.transformers_config import config_from

    config = config_from(values, recipe)
    text: Any = text_config(config)
    model = build_on_meta(config, None, dtype=torch.bfloat16, attention=None)
    model.requires_grad_(False)
    head, table = model.get_output_embeddings(), offloadable_embedding(model)
    linears = [part for part in model.modules() if isinstance(part, torch.nn.Linear) and part is not head]
    base = {
        "parameters": sum(parameter.numel() for parameter in model.parameters()),
        "linear": sum(part.weight.numel() for part in linears),
        "expert": sum(weight.numel() for weight in fused_experts(model, text)),
        "expert_4bit": sum(module.get_parameter(name).numel() for _, module, name in packable_experts(model)),
        "head": head.weight.numel() if head is not None else 0,
        "linear_width": sum(sum(part.weight.shape) for part in linears),
        "table": table.weight.numel() if table is not None else 0,
        **_layer_kinds(text),
        **_mixers(model),
    }
    plain = resolve_plain(  # adapters of rank 1
        recipe, lora_r=1, lora_alpha=1.0, use_dora=False, lora_dropout=0.0, activation_checkpointing=False,
        layer_offloading=False, offloaded_layers=0, new_tokens={}, trained_embedding_rows=[],
    )  # fmt: skip
    adapted = attach_adapters(model, plain)
    targets: Any = plain.target_modules
    # adapters on every expert are too many: adapt attention only
    if recipe.target_modules == AUTO and adapts_experts(adapted) and (attention := _attention_layers(adapted.unload())):
        targets = attention
        adapted = attach_adapters(adapted.unload(), resolved(plain, target_modules=targets))
    adapters = [parameter for _, parameter in trainable_parameters(adapted)]
    layers = list(text.per_layer_config) if getattr(text, "is_heterogeneous", False) else [text]
    experts = max(_first(layer, EXPERT_COUNTS) for layer in layers)
    return ModelShape(
        family=config.model_type, adapter_per_rank=sum(parameter.numel() for parameter in adapters),
        adapters=len(adapters) // 2, targets=targets, **base,
        layers=text.num_hidden_layers, hidden=layers[0].hidden_size,
        attention_width=max(map(_attention_width, layers)), heads=max(map(_heads, layers)),
        experts=experts, experts_used=max(_first(layer, _USED) for layer in layers) if experts else 0,
        max_positions=getattr(layers[0], "max_position_embeddings", None),
    )  # fmt: skip


def _layer_kinds(text: Any) -> dict[str, int]:
    window = getattr(text, "sliding_window", None) or getattr(text, "attention_chunk_size", None) or 0
    every_layer = "sliding_attention" if window else "full_attention"
    kinds = getattr(text, "layer_types", None) or [every_layer] * text.num_hidden_layers
    sets = {"unattended": _WITHOUT_ATTENTION, "windowed": _WINDOWED, "stateful": _WITH_STATE}
    return {"window": window, **{name: sum(kind in named for kind in kinds) for name, named in sets.items()}}


def _mixers(model: Any) -> dict[str, Any]:
    for names in (DELTA_NET, MAMBA2):
        sizes = [{name: getattr(module, name, None) for name in names} for module in model.modules()]
        if mixers := [size for size in sizes if all(isinstance(value, int) for value in size.values())]:
            return {"mixer": mixers[0], "mixers": len(mixers)}
    return {}


def _attention_layers(model: Any) -> list[str]:
    import torch

    names = [name for name, module in model.named_modules() if isinstance(module, torch.nn.Linear)]
    return sorted({name.rpartition(".")[2] for name in names if re.search(r"attn|attention", name.rpartition(".")[0])})


def _first(config: Any, names: tuple[str, ...]) -> int:
    return next((value for name in names if (value := getattr(config, name, None))), 0)


def _heads(layer: Any) -> int:
    return getattr(layer, "num_attention_heads", None) or 1


def _attention_width(layer: Any) -> int:
    heads, head = _heads(layer), getattr(layer, "head_dim", None)
    return heads * (head if isinstance(head, int) and head > 0 else layer.hidden_size // heads)
