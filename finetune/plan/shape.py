"""The size of a model: parameters by kind, counted on the transformers model built on the meta device."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

from finetune.forecast import cache
from finetune.recipe import plainest

if TYPE_CHECKING:
    from finetune.recipe import Recipe

#: Names of the number of experts in configurations.
_EXPERTS = ("num_local_experts", "num_experts", "n_routed_experts")
#: Shapes that this process has counted or read.
_known: dict[str, ModelShape] = {}


@dataclass(frozen=True)
class ModelShape:
    """Counts of parameters, and the widths that speed and advice need.

    `linear` are weights of linear layers, which 4-bit and 8-bit apply to; `expert` are fused experts of a mixture, which stay
    16-bit; `head` is the output layer. `linear_width` is the sum of inputs and outputs over the linear layers;
    `adapter_per_rank` is the adapters' count at rank 1, `adapters` how many layers (or stacks of experts) get one.
    """

    family: str
    parameters: int
    linear: int
    expert: int
    head: int
    linear_width: int
    adapter_per_rank: int
    adapters: int
    layers: int
    hidden: int
    attention_width: int
    max_positions: int | None = None
    experts: int = 0
    experts_used: int = 0

    @property
    def computed(self) -> float:
        """Parameters used per token in the layers; of a mixture's experts only the active ones."""
        return self.linear + (self.expert * self.experts_used / self.experts if self.experts else self.expert)

    @property
    def layer_width(self) -> float:
        """Inputs and outputs of one layer's linear layers; of a mixture's experts only the active ones."""
        return self.linear_width / self.layers + (self.experts_used * 3 * self.hidden if self.experts else 0)

    @property
    def billions(self) -> str:
        """The size as in `8.0B` or `135M`."""
        return f"{self.parameters / 1e9:.1f}B" if self.parameters >= 0.95e9 else f"{self.parameters / 1e6:.0f}M"

    def weight_bytes(self, bits: int) -> int:
        """Bytes of the base weights with linear layers in `bits` (4: NF4 with double quantisation), the rest in 16 bit.

        Double quantisation: 0.5 byte, a byte of scale for each 64 weights and a float for each 256 scales.
        """
        each = {4: 0.5 + 1 / 64 + 4 / (64 * 256), 8: 1.0, 16: 2.0, 32: 4.0}[bits]
        rest = 4.0 if bits == 32 else 2.0
        return round(self.linear * each + (self.parameters - self.linear) * rest)


def shape_of(config: dict[str, Any], recipe: Recipe) -> ModelShape:
    """The shape of the model that a config.json describes. Raises RecipeError when it can't be built.

    Cached on disk, so that a repeated plan does not import torch.
    """
    values = {name: value for name, value in config.items() if name != "quantization_config"}
    key = cache.key_of(kind="shape", config=values, targets=recipe.target_modules, remote_code=recipe.trust_remote_code)
    if key not in _known:
        kept = cache.read(key)
        _known[key] = _count(values, recipe) if kept is None else ModelShape(**kept)
        if kept is None:
            cache.write(key, asdict(_known[key]))
    return _known[key]


def _count(values: dict[str, Any], recipe: Recipe) -> ModelShape:
    """Parameters of the builder's modules on the meta device: 0.3 s for 8B."""
    import torch

    from finetune.model.build import attach_adapters, build_on_meta, config_from, trainable_parameters
    from finetune.model.language_model import text_config

    config = config_from(values, recipe)
    model = build_on_meta(config, None, dtype=torch.bfloat16, attention=None, remote_code=recipe.trust_remote_code)
    head = model.get_output_embeddings()
    linears = [part for part in model.modules() if isinstance(part, torch.nn.Linear) and part is not head]
    base = {
        "parameters": sum(parameter.numel() for parameter in model.parameters()),
        "linear": sum(part.weight.numel() for part in linears),
        "expert": sum(parameter.numel() for parameter in model.parameters() if parameter.dim() == 3),
        "head": head.weight.numel() if head is not None else 0,
        "linear_width": sum(sum(part.weight.shape) for part in linears),
    }
    plain = plainest(recipe, lora_r=1, lora_alpha=1.0, use_dora=False, lora_dropout=0.0, activation_checkpointing=False)
    adapters = [parameter for _, parameter in trainable_parameters(attach_adapters(model, plain))]
    return ModelShape(
        family=config.model_type,
        adapter_per_rank=sum(parameter.numel() for parameter in adapters),
        adapters=len(adapters) // 2,
        **base,
        **_widths(text_config(config)),
    )


def _widths(text: Any) -> dict[str, Any]:
    layers = list(text.per_layer_config) if getattr(text, "is_heterogeneous", False) else [text]
    experts = max(next((getattr(one, name) for name in _EXPERTS if getattr(one, name, None)), 0) for one in layers)
    used = max(getattr(one, "num_experts_per_tok", None) or 0 for one in layers) if experts else 0
    return {
        "layers": text.num_hidden_layers, "hidden": layers[0].hidden_size,
        "attention_width": max(map(_attention_width, layers)), "experts": experts, "experts_used": used,
        "max_positions": getattr(layers[0], "max_position_embeddings", None),
    }  # fmt: skip


def _attention_width(layer: Any) -> int:
    """Width of the queries; the hidden size where a model has no heads."""
    heads = getattr(layer, "num_attention_heads", None) or 1
    head = getattr(layer, "head_dim", None)
    return heads * (head if isinstance(head, int) and head > 0 else layer.hidden_size // heads)
