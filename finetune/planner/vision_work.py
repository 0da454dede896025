"""Work of a vision tower and its projector on a row's images, counted on fake tensors."""

from __future__ import annotations

from contextlib import suppress
from dataclasses import asdict, dataclass
from typing import Any

from finetune.memory import cache
from finetune.planner.shape import bare, unquantised
from finetune.settings import Recipe
from finetune.settings.vision import Sizes


@dataclass(frozen=True)
class VisionWork:
    """FLOPs and bytes of a row's images."""

    #: All operators, without adapters.
    forward_flops: float
    #: Gradients that adapters need; frozen weights get none.
    backward_flops: float
    #: Adapters of rank 1, forward and backward.
    adapter_flops: float
    #: Inputs and outputs of linear layers that a pass moves.
    forward_elements: float
    backward_elements: float
    #: Weights, width (inputs and outputs) and rank-1 adapter parameters of linear layers; parts of the ModelShape's figures.
    weights: int
    width: int
    adapter_per_rank: int

    def flops(self, rank: int) -> float:
        return self.forward_flops + self.backward_flops + rank * self.adapter_flops

    @property
    def passes(self) -> int:
        return 2 if self.backward_flops else 1


def vision_work(config: dict[str, Any], recipe: Recipe, pictures: Sizes) -> VisionWork | None:
    """Count the work on a row with these images. Raises RecipeError for an unknown processor."""
    if recipe.vision is not True or not pictures:
        return None
    from finetune.data.tokenizer import ModelPictures

    key = cache.key_of(
        kind="vision work", config=unquantised(config), model=recipe.model_name_or_path, revision=recipe.model_revision,
        processor=ModelPictures(recipe).identity,
        targets=recipe.target_modules, trained=recipe.train_vision, pictures=pictures, fields=[*VisionWork.__annotations__],
    )  # fmt: skip
    return VisionWork(**cache.cached(key, lambda: asdict(_count(config, recipe, pictures))))


class _Reached(Exception):
    """The language model is called: the images are done."""


def _count(config: dict[str, Any], recipe: Recipe, pictures: Sizes) -> VisionWork:
    import torch
    from torch.utils._pytree import tree_iter

    from finetune.compat.imports import import_libraries

    import_libraries()
    from finetune.compat.torch import backward, fake_tensor_mode, flop_counter
    from finetune.layers.checkpointing import base_of
    from finetune.memory.picture_prompt import picture_inputs
    from finetune.memory.simulate import step_errors
    from finetune.memory.small_values import SmallValues
    from finetune.model.adapters import attach_adapters
    from finetune.model.build import build_on_meta
    from finetune.model.transformers_config import config_from

    settings, full = bare(recipe), config_from(unquantised(config), recipe)
    model = attach_adapters(build_on_meta(full, None, dtype=torch.bfloat16, attention="sdpa"), settings).to(torch.bfloat16)
    base: Any = base_of(model)
    decoder = base.get_submodule(base.decoder_path)
    text = {*decoder.modules(), base.get_output_embeddings()}
    layers = [
        _Linear(module, ".lora_" in name)
        for name, module in model.named_modules()
        if isinstance(module, torch.nn.Linear) and module not in text
    ]
    forward, gradients = flop_counter(), flop_counter()
    reached: list[Any] = []

    def stop(_: Any, *inputs: Any) -> None:
        reached.extend(inputs)
        raise _Reached

    decoder.register_forward_pre_hook(stop, with_kwargs=True)
    with fake_tensor_mode(), SmallValues(), step_errors(full):
        model.to_empty(device="cpu")
        inputs = picture_inputs(settings, 1, 1, pictures)
        inputs.pop("labels")
        with suppress(_Reached), forward:
            model(**inputs)
        trained = [
            value.float().sum() for value in tree_iter(reached) if isinstance(value, torch.Tensor) and value.requires_grad
        ]
        with gradients:
            if trained:
                backward(torch.stack(trained).sum())
    base_layers, adapters = ([layer for layer in layers if layer.is_adapter == kind] for kind in (False, True))
    adapter_products = sum(layer.rows * layer.weights for layer in adapters)
    adapter_gradients = sum((layer.trained_rows + layer.gradient_rows) * layer.weights for layer in adapters)
    return VisionWork(
        forward_flops=forward.get_total_flops() - 2 * adapter_products,
        backward_flops=gradients.get_total_flops() - 2 * adapter_gradients,
        adapter_flops=2 * (adapter_products + adapter_gradients),
        forward_elements=sum(layer.rows * layer.width for layer in base_layers),
        backward_elements=sum(layer.gradient_rows * layer.width for layer in base_layers),
        weights=sum(layer.weights for layer in base_layers), width=sum(layer.width for layer in base_layers),
        adapter_per_rank=sum(layer.weights for layer in adapters),
    )  # fmt: skip


class _Linear:
    """A linear layer with counters of its rows."""

    def __init__(self, module: Any, is_adapter: bool) -> None:
        self.is_adapter = is_adapter
        self.weights, self.width = module.weight.numel(), sum(module.weight.shape)
        # rows of the forward pass, of the weight's gradient and of the inputs' gradient
        self.rows = self.trained_rows = self.gradient_rows = 0
        module.register_forward_pre_hook(self._add)

    def _add(self, module: Any, inputs: tuple[Any, ...]) -> None:
        rows = inputs[0].numel() // inputs[0].shape[-1]
        self.rows += rows
        self.trained_rows += rows if module.weight.requires_grad else 0
        self.gradient_rows += rows if inputs[0].requires_grad else 0
