"""The plan's optimizer on fake parameters, with its states allocated as after the first step."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch

from finetune.compat.bitsandbytes import optimizer_states
from finetune.memory.fake_model import layer_number
from finetune.model.adapters import trainable_parameters
from finetune.model.techniques import optimizer_class

if TYPE_CHECKING:
    from finetune.memory.tracker import StorageTracker
    from finetune.recipe import Settings


def make_optimizer(settings: Settings, model: torch.nn.Module, *, on_cpu: bool) -> torch.optim.Optimizer:
    """The optimizer that transformers' Trainer creates for these settings."""
    return _optimizer(settings, [parameter for _, parameter in trainable_parameters(model)], on_cpu=on_cpu)


def first_step(
    optimizer: torch.optim.Optimizer, model: torch.nn.Module, tracker: StorageTracker, *, on_cpu: bool = False
) -> None:
    """Run a step with zero gradients, so that the optimizer states exist, tagged with their layer."""
    tracker.recording.begin("first step")
    tracker.phase, tracker.part, tracker.layer = "first step", "optimizer", None
    zero_gradients(model, tracker)
    with paged_states_on_host(on_cpu):
        optimizer.step()
    optimizer.zero_grad()
    for name, parameter in trainable_parameters(model):
        for value in optimizer.state[parameter].values():
            if isinstance(value, torch.Tensor) and value.device.type != "meta":
                tracker.retag(value, "optimizer", layer_number(name))
    del tracker.peaks[("first step", None)]  # the second step needs all of this, and activations


def zero_gradients(model: torch.nn.Module, tracker: StorageTracker) -> None:
    """Allocate the gradient of every trainable parameter, as earlier micro-batches do."""
    for name, parameter in trainable_parameters(model):
        with tracker.tagging("gradients"):
            parameter.grad = torch.zeros_like(parameter)
        tracker.retag(parameter.grad, "gradients", layer_number(name))


def _optimizer(settings: Settings, parameters: Iterable[torch.nn.Parameter], *, on_cpu: bool) -> torch.optim.Optimizer:
    """The optimizer that `transformers.Trainer.get_optimizer_cls_and_kwargs` selects for the recipe's `optim`."""
    own = optimizer_class(settings)
    if own is not None:
        return own[0](parameters, **own[1])
    rate, decay, name = settings.learning_rate, settings.weight_decay, settings.optim
    common: dict[str, Any] = {"lr": rate, "weight_decay": decay}
    if name == "adamw_torch_fused":
        return torch.optim.AdamW(parameters, fused=True, **common)
    if name == "adafactor":
        from transformers.optimization import Adafactor

        return Adafactor(parameters, scale_parameter=False, relative_step=False, **common)
    if name in ("adamw_8bit", "paged_adamw_8bit", "paged_adamw_32bit"):
        from bitsandbytes.optim import AdamW

        return AdamW(parameters, optim_bits=8 if "8bit" in name else 32, is_paged="paged" in name, **common)
    return torch.optim.AdamW(parameters, foreach=not on_cpu, **common)  # foreach is torch's default on CUDA


@contextmanager
def paged_states_on_host(on_cpu: bool) -> Iterator[None]:
    """Inside, bitsandbytes' paged states count as host memory: CUDA managed memory, outside torch's allocator."""

    def get_state_buffer(self: Any, p: torch.Tensor, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        paged = self.is_paged and p.numel() >= 1e5 and not on_cpu
        state = torch.zeros(p.shape, dtype=dtype, device="meta" if paged else p.device)
        state.is_paged = paged  # type: ignore[attr-defined]
        return state

    with optimizer_states(get_state_buffer):
        yield
