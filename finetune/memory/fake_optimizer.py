"""The plan's optimizer on fake parameters, with its states."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

from finetune.compat.bitsandbytes import optimizer_states
from finetune.compat.transformers import trainers_optimizer
from finetune.memory.fake_model import layer_number
from finetune.memory.tracker import StorageTracker
from finetune.model.adapters import trainable_parameters
from finetune.model.techniques import optimizer_class
from finetune.settings import Settings


def make_optimizer(settings: Settings, model: torch.nn.Module, *, on_cpu: bool) -> torch.optim.Optimizer:
    """Make the optimizer that transformers' Trainer creates for these settings."""
    kind, arguments = optimizer_class(settings) or trainers_optimizer(settings.optim, settings.learning_rate)
    parameters = [parameter for _, parameter in trainable_parameters(model)]
    optimizer = kind([{"params": parameters, "weight_decay": settings.weight_decay}], **arguments)
    for group in optimizer.param_groups:
        if "foreach" in group and not group.get("fused"):
            group["foreach"] = not on_cpu  # torch's default on CUDA; fake tensors are on the CPU
    return optimizer


def first_step(
    optimizer: torch.optim.Optimizer, model: torch.nn.Module, tracker: StorageTracker, *, on_cpu: bool = False
) -> None:
    """Run a step with zero gradients, which allocates the optimizer states, tagged by layer."""
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
    """Allocate every trainable parameter's gradient, as earlier micro-batches do."""
    for name, parameter in trainable_parameters(model):
        with tracker.tagging("gradients"):
            parameter.grad = torch.zeros_like(parameter)
        tracker.retag(parameter.grad, "gradients", layer_number(name))


@contextmanager
def paged_states_on_host(on_cpu: bool) -> Iterator[None]:
    """Count bitsandbytes' paged states as host memory."""

    def get_state_buffer(self: Any, p: torch.Tensor, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        # paged states are CUDA managed memory, outside torch's allocator
        paged = self.is_paged and p.numel() >= 1e5 and not on_cpu
        state = torch.zeros(p.shape, dtype=dtype, device="meta" if paged else p.device)
        state.is_paged = paged  # type: ignore[attr-defined]
        return state

    with optimizer_states(get_state_buffer):
        yield
