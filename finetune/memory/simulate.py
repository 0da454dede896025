"""Dry run of an optimizer step, an evaluation and a save on fake tensors."""

from __future__ import annotations

import functools
import gc
import logging
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from transformers import PretrainedConfig

from finetune.compat.bitsandbytes import replaced_state_buffers
from finetune.compat.torch import backward
from finetune.compat.transformers import auxiliary_loss, keys_repeated, trainers_optimizer, wrap_checkpoint
from finetune.compat.trl import add_loss, narrow_tiles
from finetune.data.report import first_line
from finetune.errors import FinetuneError, RecipeError
from finetune.layers.checkpointing import base_of, decoder_layers
from finetune.layers.layer_offloading import offload_embedding, offloading_of
from finetune.layers.varlen_attention import forecast_for
from finetune.memory.compiled_layers import SplitLayers
from finetune.memory.depth import AUXILIARY, Simulation
from finetune.memory.fake_model import (
    cast_adapters_in_turn,
    fake_dora_weights,
    layer_number,
    materialise,
)
from finetune.memory.fake_tensors import CudaFunctions, SmallValues, fake_tensors
from finetune.memory.forecast import Batch
from finetune.memory.picture_prompt import picture_inputs
from finetune.memory.rules import Capability, cublas_workspace_bytes, rules_for
from finetune.memory.tracker import Rule, StorageTracker
from finetune.methods import TrainingMethod, method_of
from finetune.model.adapters import attach_adapters, cast_trainable, trainable_parameters
from finetune.model.build import build_base, model_dtype, must_repeat_keys
from finetune.model.hybrid import kernel_fallback_notes
from finetune.model.language_model import loads_vision, text_config
from finetune.model.padding import needs_padding_mask, without_mask
from finetune.model.techniques import apply_techniques, optimizer_class, step_context
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
        if torch.is_grad_enabled() and inputs and isinstance(inputs[0], Tensor):  # the layer saves its input
            tracker.retag(inputs[0], "activations", number)

    def leave_layer(number: int, _module: Any, _inputs: Any, output: Any) -> None:
        hidden = output[0] if isinstance(output, tuple) else output
        if hidden.requires_grad:
            hidden.register_hook(functools.partial(enter_backward, number))
        tracker.layer = None

    def enter_backward(number: int | None, _grad: Tensor) -> None:
        tracker.phase, tracker.part, tracker.layer, tracker.inherits = "backward", "workspace", number, False

    def begin_forward(_module: Any, _inputs: Any) -> None:
        if tracker.phase == "loss":  # the reference model's pass is over
            tracker.phase = "forward"
        tracker.part = "activations"

    def begin_loss(_module: Any, _inputs: Any, output: Any) -> None:
        tracker.part = "loss"
        if tracker.phase == "forward":
            tracker.phase = "loss"
            if output.last_hidden_state.requires_grad:  # when its gradient is ready, the loss's backward pass is over
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
    model: Any, optimizer: Any, tracker: StorageTracker, loss: Callable[[], Tensor],
    arguments: Any,  # Settings or TrainingArguments
    *, context: AbstractContextManager[Any], on_cpu: bool,
) -> None:  # fmt: skip
    """Run an optimizer step on zero gradients, then, inside `context`, the last micro-batch of a second step."""
    for group in optimizer.param_groups:
        if "foreach" in group and group["foreach"] is None and not group.get("fused"):
            group["foreach"] = not on_cpu  # torch's default on CUDA; fake tensors are on the CPU
    parameters = [parameter for _, parameter in trainable_parameters(model)]

    def record_accumulation(parameter: Tensor, grad: Tensor) -> None:
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
    """Allocate and release the copies that a checkpoint's state dict makes: each 4-bit layer's nested code book."""
    tracker.recording.begin_part("save")
    gc.collect()
    tracker.phase, tracker.part = "save", "workspace"
    # PEFT picks the adapters from the state dict of the whole model, which calls bitsandbytes' QuantState.as_dict
    copies = []
    for path, module in model.named_modules():
        nested_state = getattr(getattr(module._parameters.get("weight"), "quant_state", None), "state2", None)
        if nested_state is not None:
            tracker.layer = layer_number(path)
            copies.append(nested_state.code.clone())
    tracker.layer = None
    tracker.record()


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
            if isinstance(value, Tensor) and value.device.type != "meta":
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

    def get_state_buffer(self: Any, p: Tensor, dtype: torch.dtype = torch.float32) -> Tensor:
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


def simulate(config: PretrainedConfig, settings: Settings, batch: Batch, capability: Capability | None) -> Simulation:
    """Simulate a run on a GPU of this compute capability, or on the CPU (None)."""
    with _quiet(), step_tracker(capability) as tracker, narrow_tiles(config, on_cpu=capability is None):
        padded = batch.padded and (loads_vision(config) or needs_padding_mask(config))
        batch = replace(batch, padded=padded, held_out=batch.held_out and replace(batch.held_out, padded=padded))
        model = attach_adapters(build_base(settings, config, device="cpu", weights=False, offloads=True), settings)
        apply_techniques(model, settings)
        cast_trainable(model, torch.float32)  # PEFT creates adapters in fp32
        add_loss(model)
        observe(model, tracker)
        compiled_layers = decoder_layers(model) if settings.torch_compile else []
        split_layers = SplitLayers(compiled_layers, selective=settings.activation_checkpointing == "selective")
        with (
            forecast_for(capability),
            auxiliary_loss(functools.partial(tag_auxiliary_loss, tracker)),
            keys_repeated() if capability and must_repeat_keys(model_dtype(settings), capability) else nullcontext(),
            fake_tensors(model, capability, batch.trained_tokens, packed=settings.packing is True) as semantics,
            SmallValues() if settings.vision is True else nullcontext(),
            tracker,
        ):
            materialise(model, tracker, dtype=model_dtype(settings))
            # TRL casts the fp32 adapters of quantised models to bf16; a run then casts them to its dtype
            trl_dtypes = [torch.bfloat16] if settings.requested_formats else []
            cast_adapters_in_turn(model, tracker, [*trl_dtypes, getattr(torch, settings.adapter_dtype)])
            if settings.offload_embeddings is True:
                offload_embedding(model)
            if (offloading := offloading_of(model)) is not None:
                offloading.wrap_checkpoints()
            with step_errors(config, settings):
                _run(model, tracker, settings, batch, semantics, on_cpu=capability is None)
        notes = (*split_layers.notes, *kernel_fallback_notes(text_config(config).model_type, capability))
        if batch.padded and batch.rows > 1 and settings.attn_implementation == "sdpa":
            size = f"{batch.tokens} x {batch.tokens}"
            notes = (f"padded rows of this model need a {size} attention mask each, counted as activations", *notes)
        del model, compiled_layers, split_layers  # so that `step_tracker` collects them when it ends
    return Simulation(tracker.peaks, tracker.host, notes, tracker.recording)


def _run(
    model: Any, tracker: StorageTracker, settings: Settings, batch: Batch, semantics: CudaFunctions | None, *, on_cpu: bool
) -> None:
    model.train()
    method = method_of(settings)
    trainable = trainable_parameters(model)
    method.copy_reference(model)
    for (name, _), copy in zip(trainable, method.reference_copies, strict=False):
        tracker.retag(copy, "weights", layer_number(name))
    batches: list[dict[str, Any]] = []

    def loss() -> Tensor:
        tracker.phase = "forward"
        # the trainer moves all micro-batches of a step to the GPU first; text batches are small, so one is counted
        count = settings.gradient_accumulation_steps if settings.vision is True else 1
        batches.extend(_inputs(settings, batch, tracker) for _ in range(count))
        return _forward(method, model, batch, batches[-1])

    # as transformers' Trainer creates it
    optimizer_type, kwargs = optimizer_class(settings) or trainers_optimizer(settings.optim, settings.learning_rate)
    group = {"params": [parameter for _, parameter in trainable], "weight_decay": settings.weight_decay}
    optimizer = optimizer_type([group], **kwargs)
    take_step(model, optimizer, tracker, loss, settings, context=step_context(settings, "cpu"), on_cpu=on_cpu)
    if settings.vision is not True:  # the trainer still has the step's batches while it saves and evaluates
        batches.clear()
    save(model, tracker)
    if held_out := batch.held_out:
        tracker.recording.begin_part("eval")
        model.eval()
        if semantics is not None:
            semantics.trained_tokens = held_out.trained_tokens
        with torch.no_grad():
            tracker.phase = "eval"
            _forward(method, model, held_out, _inputs(settings, held_out, tracker))


def _inputs(settings: Settings, batch: Batch, tracker: StorageTracker) -> dict[str, Any]:
    tracker.part, tracker.layer = "activations", None
    if settings.vision is True:
        return picture_inputs(settings, batch.rows, batch.tokens, batch.pictures)
    shape = (batch.rows, batch.tokens)
    inputs: dict[str, Any] = {"input_ids": torch.zeros(shape, dtype=torch.long), "labels": torch.zeros(shape, dtype=torch.long)}
    if settings.packing is True:
        inputs["position_ids"] = torch.zeros(shape, dtype=torch.long)
        if settings.attn_implementation in ("torch_varlen", "flash_attention_2"):
            offsets = torch.zeros(batch.documents + 1, dtype=torch.int32)
            longest = -(-batch.tokens // batch.documents)
            inputs |= {"cu_seq_lens_q": offsets, "cu_seq_lens_k": offsets, "max_length_q": longest, "max_length_k": longest}
        return inputs
    inputs["attention_mask"] = torch.ones(shape, dtype=torch.long)
    return inputs | method_of(settings).dry_run_inputs(batch.rows, batch.mismatched_tokens or batch.tokens)


def _forward(method: TrainingMethod, model: Any, batch: Batch, inputs: dict[str, Any]) -> Tensor:
    """Run forward and loss like `RunTrainer.compute_loss`."""
    # rows of equal length need no mask
    needs_mask = (batch.padded and batch.rows > 1) or method.settings.vision is True
    losses = method.loss(_AutocastModel(model, method.settings), inputs if needs_mask else without_mask(inputs))
    return losses.loss if losses.auxiliary is None else losses.loss + losses.auxiliary


class _AutocastModel:
    """A model with a separate autocast region per pass, as accelerate wraps it."""

    def __init__(self, model: Any, settings: Settings) -> None:
        self.module, self._dtype, self.parameters = model, model_dtype(settings), model.parameters

    def __call__(self, **inputs: Any) -> Any:
        # a pass must not reuse weights that an earlier pass cast: it may need their gradients
        with torch.autocast("cpu", dtype=self._dtype, enabled=self._dtype != torch.float32):
            return self.module(**inputs)


@contextmanager
def _quiet() -> Iterator[None]:
    disabled_level = logging.root.manager.disable
    logging.disable(logging.WARNING)
    try:
        with warnings.catch_warnings(action="ignore"):
            yield
    finally:
        logging.disable(disabled_level)
