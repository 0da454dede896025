"""Memory techniques of a plan, applied for training and for the forecast; AdamW with its states in host memory."""

from __future__ import annotations

import contextlib
from collections import defaultdict
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor
from torch.optim.adamw import adamw

from finetune.layers.checkpointing import decoder_layers, outside_layers, set_checkpointing
from finetune.layers.compiled import compile_layers, undo_compiling, use_operators
from finetune.layers.host_memory import host_empty, is_in_forecast
from finetune.layers.layer_offloading import offload_embedding, offloading_of
from finetune.layers.lean_layers import make_lean, tile_mlps, undo_lean
from finetune.layers.offload import SavedActivations, offload_beside
from finetune.settings import Settings


def apply_techniques(model: torch.nn.Module, settings: Settings) -> None:
    """Apply lean layers, gradient checkpointing, compilation and an offloaded embedding; callable again with other settings."""
    layers, in_forecast = decoder_layers(model), any(map(is_in_forecast, model.parameters()))
    undo_compiling(layers)
    modules = [*layers, *outside_layers(model)]
    (make_lean if settings.lean_layers is True else undo_lean)(modules)
    # an embedding in host memory stays there; a forecast moves it once it is loaded
    if settings.offload_embeddings is True and not in_forecast:
        offload_embedding(model)
    set_checkpointing(model, settings)
    if (offloading := offloading_of(model)) is not None:
        offloading.wrap_checkpoints()
    if settings.lean_layers is True:
        tile_mlps([layer for layer in layers if layer.gradient_checkpointing], settings.mlp_tile_tokens)
    if settings.torch_compile:
        use_operators(layers)
        if not in_forecast:
            # a forecast splits layers itself, as the compiler would
            compile_layers(layers)


def step_context(settings: Settings, device: torch.device | str) -> contextlib.AbstractContextManager[Any]:
    """Return the context for forward and backward of a micro-batch: hooks on saved activations, or none."""
    # compiled layers offload their inputs by hooks around the whole step: hooks inside would break a layer's graph
    if settings.torch_compile and settings.activation_checkpointing == "offload":
        return SavedActivations(offload_beside(torch.device(device)))
    return contextlib.nullcontext()


_MOMENTS = ("exp_avg", "exp_avg_sq")


# Gradients are copied to the host in `step()`, not in backward, so clipping, gradient accumulation, loss scaling and
# schedules work as with any other optimizer. Host memory: 12 bytes of state per parameter, allocated at the first step, and a
# staging buffer in the weights' dtype, for gradients on their way to the host and weights on their way back.
class CpuAdamW(torch.optim.Optimizer):
    """AdamW by torch's fused CPU kernel; bit-identical to `torch.optim.AdamW` for fp32 weights."""

    def __init__(
        self, params: Iterable[Any], lr: float = 1e-3, betas: tuple[float, float] = (0.9, 0.999), eps: float = 1e-8,
        weight_decay: float = 0.0,
    ) -> None:  # fmt: skip
        super().__init__(params, {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay})
        self._staging: dict[Tensor, Tensor] = {}

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        groups = [(group, [p for p in group["params"] if p.grad is not None]) for group in self.param_groups]
        updated = [parameter for _, parameters in groups for parameter in parameters]
        for parameter in updated:
            self._staging_buffer(parameter).copy_(parameter.grad, non_blocking=True)
            if not self.state[parameter]:
                # fp32 masters, so that small updates of 16-bit adapters add up
                self.state[parameter] = {"step": _step_count(parameter), "master": _host_fp32(parameter).copy_(parameter)}
                self.state[parameter] |= {name: _host_fp32(parameter).zero_() for name in _MOMENTS}
        for device in {parameter.device for parameter in updated if parameter.is_cuda}:
            torch.cuda.current_stream(device).synchronize()  # until the gradients have arrived
        for group, parameters in groups:
            if parameters:
                states, (beta1, beta2) = [self.state[parameter] for parameter in parameters], group["betas"]
                adamw(
                    [state["master"] for state in states],
                    [self._staging_buffer(parameter).float() for parameter in parameters],
                    [state["exp_avg"] for state in states],
                    [state["exp_avg_sq"] for state in states],
                    [],
                    [state["step"] for state in states],
                    fused=True, amsgrad=False, maximize=False,
                    beta1=beta1, beta2=beta2, lr=group["lr"], weight_decay=group["weight_decay"], eps=group["eps"],
                )  # fmt: skip
        for parameter in updated:
            parameter.copy_(self._staging_buffer(parameter).copy_(self.state[parameter]["master"]), non_blocking=True)

    @torch.no_grad()
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load a state into host memory, and set the weights to the master weights. Raises ValueError for other groups."""
        # torch would move the state to the weights' device and dtype
        super().load_state_dict({**state_dict, "state": {}})
        parameters = [parameter for group in self.param_groups for parameter in group["params"]]
        ids = [index for group in state_dict["param_groups"] for index in group["params"]]
        self.state = defaultdict(dict)
        for index, parameter in zip(ids, parameters, strict=True):
            saved = state_dict["state"].get(index)
            if saved:
                self.state[parameter] = {name: _host_fp32(parameter).copy_(saved[name]) for name in ("master", *_MOMENTS)}
                self.state[parameter]["step"] = _step_count(parameter).copy_(saved["step"])
                parameter.copy_(self.state[parameter]["master"])

    def _staging_buffer(self, parameter: Tensor) -> Tensor:
        if parameter not in self._staging:
            self._staging[parameter] = host_empty(parameter, pinned=parameter.is_cuda)
        return self._staging[parameter]


def _host_fp32(like: Tensor) -> Tensor:
    return host_empty(like, torch.float32, pinned=like.is_cuda)


def _step_count(parameter: Tensor) -> Tensor:
    return _host_fp32(parameter.new_empty(())).zero_()


#: This project's optimizers by name in a recipe; all other names are transformers'.
_OPTIMIZERS = {"adamw_cpu_offload": CpuAdamW}


def training_arguments(settings: Settings) -> dict[str, Any]:
    """Return the SFTConfig fields of the memory techniques."""
    return {
        # `apply_techniques` has turned it on in the model: TRL would add it again
        "activation_checkpointing": False,
        "optim": "adamw_torch" if settings.optim in _OPTIMIZERS else settings.optim,
    }


def optimizer_class(settings: Settings) -> tuple[type[torch.optim.Optimizer], dict[str, Any]] | None:
    """Return Trainer's `optimizer_cls_and_kwargs` for this project's optimizers, or None."""
    if settings.optim not in _OPTIMIZERS:
        return None
    return _OPTIMIZERS[settings.optim], {"lr": settings.learning_rate, "weight_decay": settings.weight_decay}
