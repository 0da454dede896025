"""Dry run of an optimizer step, an evaluation and a save on fake tensors."""

from __future__ import annotations

import functools
import logging
import warnings
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from typing import Any

import torch
from transformers import PretrainedConfig

from finetune.compat.transformers import auxiliary_loss, keys_repeated, trainers_optimizer
from finetune.compat.trl import add_loss, narrow_tiles
from finetune.layers.checkpointing import decoder_layers
from finetune.layers.layer_offloading import offload_embedding, offloading_of
from finetune.layers.varlen_attention import forecast_for
from finetune.memory.compiled_layers import SplitLayers
from finetune.memory.depth import Simulation
from finetune.memory.fake_model import cast_adapters_in_turn, layer_number, materialise
from finetune.memory.fake_tensors import CudaFunctions, SmallValues, fake_tensors
from finetune.memory.forecast import Batch
from finetune.memory.picture_prompt import picture_inputs
from finetune.memory.rules import Capability
from finetune.memory.step import observe, save, step_errors, step_tracker, tag_auxiliary_loss, take_step
from finetune.memory.tracker import StorageTracker
from finetune.methods import TrainingMethod, method_of
from finetune.model.adapters import attach_adapters, cast_trainable, trainable_parameters
from finetune.model.build import build_base, model_dtype, must_repeat_keys
from finetune.model.hybrid import kernel_fallback_notes
from finetune.model.language_model import loads_vision, text_config
from finetune.model.padding import needs_padding_mask, without_mask
from finetune.model.techniques import apply_techniques, optimizer_class, step_context
from finetune.settings import Settings


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
        split_layers = SplitLayers(selective=settings.activation_checkpointing == "selective")
        if settings.torch_compile:
            split_layers.patch_forwards(decoder_layers(model))
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
        del model, split_layers  # so that `step_tracker` collects them when it ends
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

    def loss() -> torch.Tensor:
        tracker.phase = "forward"
        # the trainer moves all micro-batches of a step to the GPU first; text batches are small, so one is counted
        count = settings.gradient_accumulation_steps if settings.vision is True else 1
        batches.extend(_inputs(settings, batch, tracker) for _ in range(count))
        return _forward(method, model, batch, batches[-1], tracker, "forward")

    # as transformers' Trainer creates it
    optimizer_type, kwargs = optimizer_class(settings) or trainers_optimizer(settings.optim, settings.learning_rate)
    group = {"params": [parameter for _, parameter in trainable], "weight_decay": settings.weight_decay}
    optimizer = optimizer_type([group], **kwargs)
    take_step(model, optimizer, tracker, loss, settings, context=step_context(settings, "cpu"), on_cpu=on_cpu)
    if settings.vision is not True:  # the trainer still has the step's batches while it saves and evaluates
        batches.clear()
    save(model, tracker)
    tracker.record()
    if held_out := batch.held_out:
        tracker.recording.begin_part("eval")
        model.eval()
        if semantics is not None:
            semantics.trained_tokens = held_out.trained_tokens
        with torch.no_grad():
            tracker.phase = "eval"
            _forward(method, model, held_out, _inputs(settings, held_out, tracker), tracker, "eval")


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


def _forward(
    method: TrainingMethod, model: Any, batch: Batch, inputs: dict[str, Any], tracker: StorageTracker, phase: str
) -> torch.Tensor:
    """Run forward and loss like `RunTrainer.compute_loss`."""
    tracker.phase, tracker.part, tracker.layer = phase, "activations", None
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
