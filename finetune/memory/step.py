"""An optimizer step on fake tensors, for forecasts of a recipe and of a trainer."""

from __future__ import annotations

import functools
import gc
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import torch
from transformers import PretrainedConfig

from finetune.compat.bitsandbytes import replaced_state_buffers
from finetune.compat.torch import backward
from finetune.compat.transformers import wrap_checkpoint
from finetune.data.report import first_line
from finetune.errors import FinetuneError, RecipeError
from finetune.layers.checkpointing import base_of, decoder_layers
from finetune.memory.depth import AUXILIARY
from finetune.memory.fake_model import allocate_state_dict_copies, fake_dora_weights, layer_number
from finetune.memory.rules import Capability, cublas_workspace_bytes, rules_for
from finetune.memory.tracker import Rule, StorageTracker
from finetune.model.adapters import trainable_parameters
from finetune.settings import Settings


@contextmanager
def step_tracker(capability: Capability | None, more_rules: Mapping[Any, Rule] = {}) -> Iterator[StorageTracker]:
    """Yield a tracker for a GPU of this compute capability, or for the CPU (None)."""
    rules, workspace_bytes = {**rules_for(capability), **more_rules}, cublas_workspace_bytes(capability)
    with fake_dora_weights(), garbage_collection_paused():
        yield StorageTracker(rules, workspace_bytes=workspace_bytes)


def observe(model: Any, tracker: StorageTracker) -> None:
    """Hook the model so that the tracker knows the running layer, the loss and recomputation."""

    def enter_layer(number: int, _module: Any, inputs: tuple[Any, ...]) -> None:
        tracker.layer = number
        if torch.is_grad_enabled() and inputs and isinstance(inputs[0], torch.Tensor):  # the layer saves its input
            tracker.retag(inputs[0], "activations", number)

    def leave_layer(number: int, _module: Any, _inputs: Any, output: Any) -> None:
        hidden = output[0] if isinstance(output, tuple) else output
        if hidden.requires_grad:
            hidden.register_hook(functools.partial(enter_backward, number))
        tracker.layer = None

    def enter_backward(number: int | None, _grad: torch.Tensor) -> None:
        tracker.phase, tracker.part, tracker.layer, tracker.inherits = "backward", "workspace", number, False

    def begin_forward(_module: Any, _inputs: Any) -> None:
        if tracker.phase == "loss":  # the reference model's pass is over
            tracker.phase = "forward"
        tracker.part = "activations"

    def begin_loss(_module: Any, _inputs: Any, output: Any) -> None:
        tracker.part = "loss"
        if tracker.phase == "forward":
            tracker.phase = "loss"
            if output.last_hidden_state.requires_grad:  # its gradient ends the backward pass of the loss
                output.last_hidden_state.register_hook(functools.partial(enter_backward, None))

    for number, layer in enumerate(decoder_layers(model)):
        layer.register_forward_pre_hook(functools.partial(enter_layer, number))
        layer.register_forward_hook(functools.partial(leave_layer, number))
        # the outer partial makes the inner one from the layer's checkpoint function
        wrap_checkpoint(layer, functools.partial(functools.partial, _tagged_checkpoint, tracker))
    base_of(model).base_model.register_forward_pre_hook(begin_forward)
    base_of(model).base_model.register_forward_hook(begin_loss)


def tag_auxiliary_loss(tracker: StorageTracker, loss_function: Any, *inputs: Any) -> Any:
    """Tag tensors of the router's auxiliary loss with the layer of their logits, also in backward."""
    if tracker.phase == "loss":  # a separate phase, which grows with the number of layers and may need more than the loss
        tracker.phase = AUXILIARY
    tracker.inherits = True
    try:
        return loss_function(*inputs)
    finally:
        tracker.inherits = False


def _tagged_checkpoint(tracker: StorageTracker, checkpoint: Any, function: Any, *inputs: Any) -> Any:
    def tagged(*inputs: Any) -> Any:
        with tracker.tagging("recomputed" if tracker.phase == "backward" else tracker.part):
            return function(*inputs)

    return checkpoint(tagged, *inputs)


def take_step(
    model: Any, optimizer: Any, tracker: StorageTracker, loss: Callable[[], torch.Tensor],
    arguments: Any,  # Settings or TrainingArguments
    *, context: AbstractContextManager[Any], on_cpu: bool,
) -> None:  # fmt: skip
    """Run an optimizer step on zero gradients, then, inside `context`, the last micro-batch of a second step."""
    for group in optimizer.param_groups:
        if "foreach" in group and group["foreach"] is None and not group.get("fused"):
            group["foreach"] = not on_cpu  # torch's default on CUDA; fake tensors are on the CPU
    parameters = [parameter for _, parameter in trainable_parameters(model)]

    def record_accumulation(parameter: torch.Tensor, grad: torch.Tensor) -> None:
        if parameter.grad is not None:
            tracker.recording.accumulate(grad.untyped_storage()._cdata, parameter.grad.untyped_storage()._cdata)

    for parameter in parameters:
        parameter.register_hook(functools.partial(record_accumulation, parameter))
        parameter.register_post_accumulate_grad_hook(lambda p: tracker.retag(p.grad, "gradients"))
    # optimizer states exist from the second step on, so its peak is the highest
    first_step(optimizer, model, tracker, on_cpu=on_cpu)
    if arguments.gradient_accumulation_steps != 1:  # earlier micro-batches have allocated the gradients
        allocate_gradients(model, tracker)
    tracker.recording.begin_part("micro-batch")
    with context:
        loss_value = loss()
        tracker.phase, tracker.part, tracker.layer, tracker.inherits = "loss backward", "loss", None, True
        backward(loss_value)
    del loss_value
    tracker.recording.begin_part("clipping")
    tracker.phase, tracker.part, tracker.layer = "optimizer", "workspace", None
    torch.nn.utils.clip_grad_norm_(parameters, arguments.max_grad_norm, foreach=not on_cpu)
    tracker.recording.begin_part("optimizer")
    with paged_states_on_host(on_cpu):
        optimizer.step()
    optimizer.zero_grad()


def save(model: Any, tracker: StorageTracker) -> None:
    """Allocate the copies that saving a checkpoint makes."""
    tracker.recording.begin_part("save")
    gc.collect()
    tracker.phase, tracker.part = "save", "workspace"
    allocate_state_dict_copies(model, tracker)


def first_step(
    optimizer: torch.optim.Optimizer, model: torch.nn.Module, tracker: StorageTracker, *, on_cpu: bool = False
) -> None:
    """Allocate the optimizer states by a step with zero gradients."""
    tracker.recording.begin_part("first step")
    tracker.phase, tracker.part, tracker.layer = "first step", "optimizer", None
    allocate_gradients(model, tracker)
    with paged_states_on_host(on_cpu):
        optimizer.step()
    optimizer.zero_grad()
    for name, parameter in trainable_parameters(model):
        for value in optimizer.state[parameter].values():
            if isinstance(value, torch.Tensor) and value.device.type != "meta":
                tracker.retag(value, "optimizer", layer_number(name))
    del tracker.peaks[("first step", None)]  # the second step's peak is higher: it also has activations


def allocate_gradients(model: torch.nn.Module, tracker: StorageTracker) -> None:
    """Allocate every trainable parameter's gradient, as earlier micro-batches do."""
    for name, parameter in trainable_parameters(model):
        with tracker.tagging("gradients"):
            parameter.grad = torch.zeros_like(parameter)
        tracker.retag(parameter.grad, "gradients", layer_number(name))


def paged_states_on_host(on_cpu: bool) -> AbstractContextManager[None]:
    """Temporarily count bitsandbytes' paged states as host memory."""

    def get_state_buffer(self: Any, p: torch.Tensor, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        # paged states are CUDA managed memory, outside torch's allocator; bitsandbytes pages from 1e5 elements
        is_paged = self.is_paged and p.numel() >= 1e5 and not on_cpu
        # the tracker counts meta tensors as host memory
        state = torch.zeros(p.shape, dtype=dtype, device="meta" if is_paged else p.device)
        state.is_paged = is_paged  # type: ignore[attr-defined]
        return state

    return replaced_state_buffers(get_state_buffer)


@contextmanager
def step_errors(config: PretrainedConfig, settings: Settings | None = None) -> Iterator[None]:
    """Turn an error in a model's own code into a RecipeError, whose advice names the settings that replace layers."""
    try:
        yield
    except FinetuneError:
        raise
    except Exception as error:
        # some of the hundreds of model types don't run on fake tensors
        changes = ["lean_layers=false"] if settings and settings.lean_layers is True else []
        changes += [f"{base.setting}=false" for base in settings.requested_formats] if settings else []
        try_own_layers = f"Try the model's own layers: {' '.join(changes)}. " if changes else ""
        raise RecipeError(
            f"a training step of this {config.model_type} model fails, or needs the values of tensors, which a forecast lacks: "
            f"{type(error).__name__}: {first_line(error)}",
            f"{try_own_layers}Give another model, or report it with its config.json.",
        ) from error


@contextmanager
def garbage_collection_paused() -> Iterator[None]:
    """Pause automatic garbage collection. May be nested."""
    # the libraries' reference cycles hold tensors, so collection at random moments would vary the peaks
    is_outermost = gc.isenabled()
    gc.disable()
    # explicit collections between phases then scan only the dry run's objects
    gc.freeze()
    try:
        yield
    finally:
        gc.collect()  # cycles of the dry run, before older objects are unfrozen
        if is_outermost:
            gc.unfreeze()
            gc.enable()
