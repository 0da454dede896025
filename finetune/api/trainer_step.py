"""Dry run of a trainer's model, collator, loss and optimizer on fake tensors."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from contextlib import nullcontext
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from finetune.errors import RecipeError
from finetune.memory.depth import Simulation
from finetune.memory.fake_model import layer_number
from finetune.memory.fake_tensors import fake_tensors
from finetune.memory.rules import Capability
from finetune.memory.simulate import observe, save, step_errors, step_tracker, take_step
from finetune.memory.tracker import StorageTracker
from finetune.model.padding import without_mask

if TYPE_CHECKING:
    pass


@dataclass(frozen=True)
class LargestBatch:
    """The collated micro-batch of the longest rows."""

    inputs: dict[str, Any]  # only shape and dtype of tensors are simulated
    trained_tokens: int  # labels that count in the loss
    may_have_mask: bool  # whether a batch of this size may have an attention mask


def largest_batch(dataset: Any, collator: Any, rows: int) -> LargestBatch:
    """Collate the longest rows. Raises RecipeError."""
    if not hasattr(dataset, "__getitem__") or not hasattr(dataset, "__len__"):
        raise RecipeError("the dataset is streamed, so its longest rows are unknown", "Give a dataset with a length.")
    lengths = [max(len(value) for value in row.values() if isinstance(value, (list, Tensor))) for row in dataset]
    longest = sorted(range(len(lengths)), key=lengths.__getitem__)[-rows:]
    inputs = dict(collator([dataset[index] for index in reversed(longest)]))
    labels, mask = inputs.get("labels"), inputs.get("attention_mask")
    batch_tokens = max(value.numel() for value in inputs.values() if isinstance(value, Tensor))
    # the loss shifts labels by one, and ignores -100
    trained_tokens = batch_tokens if labels is None else int((labels[..., 1:] != -100).sum())
    are_uneven = rows > 1 and len(set(lengths)) > 1  # then a batch of this size may need padding
    return LargestBatch(inputs, trained_tokens, mask is not None and are_uneven)


def simulate_trainer(trainer: Any, batch: LargestBatch, capability: Capability | None) -> Simulation:
    """Simulate an optimizer step, on the CPU without a `capability`; the trainer stays unchanged."""
    values_read = {torch.ops.aten._local_scalar_dense.default: _assumed_scalar}
    with step_tracker(capability, values_read) as tracker:
        fake = fake_tensors(trainer.model, capability, batch.trained_tokens, packed="position_ids" in batch.inputs)
        with step_errors(trainer.model.config), fake, tracker:
            model = fake_copy(trainer.model, tracker)
            observe(model, tracker)
            if not batch.may_have_mask:  # transformers drops a mask of ones, but a fake mask has no values to read
                model.register_forward_pre_hook(lambda _, args, kwargs: (args, without_mask(kwargs)), with_kwargs=True)
            trainer_copy = copy.copy(trainer)
            trainer_copy.model = trainer_copy.model_wrapped = model
            trainer_copy.optimizer = trainer_copy.lr_scheduler = None
            if "_metrics" in vars(trainer):  # TRL's loss appends to these lists, which the original trainer logs
                vars(trainer_copy)["_metrics"] = copy.deepcopy(vars(trainer)["_metrics"])
            _simulate_step(trainer_copy, model, tracker, batch, on_cpu=capability is None)
        del model, trainer_copy
    return Simulation(tracker.peaks, tracker.host, (), tracker.recording)


def _assumed_scalar(_tracker: StorageTracker, _function: Any, arguments: tuple[Any, ...], _named: dict[str, Any]) -> Any:
    # a fake tensor has no value; TRL's loss reads counts for its metrics, which change no allocation
    dtype = arguments[0].dtype
    return True if dtype is torch.bool else 1.0 if dtype.is_floating_point else 1


def _enable_checkpointing(model: Any, args: Any) -> None:
    if not args.activation_checkpointing or model.is_activation_checkpointing:
        return
    arguments = dict(args.activation_checkpointing_kwargs or {})
    every_n_layers = arguments.pop("every_n_layers", 1)
    if arguments.pop("offload", False):
        raise RecipeError(
            "offload in activation_checkpointing_kwargs can't be forecast", "Leave it out, or plan a run: finetune plan RECIPE"
        )
    model.activation_checkpointing_enable(arguments or None, every_n_layers)


def _simulate_step(trainer_copy: Any, model: Any, tracker: StorageTracker, batch: LargestBatch, *, on_cpu: bool) -> None:
    args = trainer_copy.args
    model.train()
    _enable_checkpointing(model, args)  # transformers enables it in `train`, which the dry run does not call
    optimizer = trainer_copy.create_optimizer()

    def loss() -> Tensor:
        tracker.phase, tracker.part, tracker.layer = "forward", "activations", None
        inputs = {
            name: torch.empty(value.shape, dtype=value.dtype) if isinstance(value, Tensor) else value
            for name, value in batch.inputs.items()
        }
        dtype = torch.bfloat16 if args.bf16 else torch.float16
        with torch.autocast("cpu", dtype=dtype, enabled=args.bf16 or args.fp16):
            return trainer_copy.compute_loss(model, inputs)

    take_step(model, optimizer, tracker, loss, args, context=nullcontext(), on_cpu=on_cpu)
    save(model, tracker)


def fake_copy(model: nn.Module, tracker: StorageTracker) -> nn.Module:
    """Copy a model to fake tensors, tagged as weights or adapters."""
    # weights on meta are offloaded and stay there, unless all are on meta: then the model was built without weights
    keep_meta = not all(parameter.is_meta for parameter in model.parameters())
    copies: dict[int, Any] = {}  # memo of `copy.deepcopy`: copies by object id

    def add(tensor: Tensor) -> None:
        if id(tensor) in copies:  # shared
            return
        device = "meta" if tensor.is_meta and keep_meta else "cpu"
        empty = torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device=device)
        is_parameter = isinstance(tensor, nn.Parameter)
        copies[id(tensor)] = nn.Parameter(empty, requires_grad=tensor.requires_grad) if is_parameter else empty

    tracker.recording.begin_part("load")
    has_adapters = any("lora_" in name for name, _ in model.named_parameters())
    for name, parameter in model.named_parameters():
        part = "adapters" if has_adapters and parameter.requires_grad else "weights"
        tracker.layer = layer_number(name)
        with tracker.tagging(part):
            add(parameter)
        if part == "weights":
            tracker.recording.weights[tracker.layer] += parameter.nbytes
    tracker.layer = None
    with tracker.tagging("weights"):
        # buffers, and tensors in attributes such as the QuantState of a 4-bit weight, must not be copied with their bytes
        for buffer in model.buffers():
            add(buffer)
        for owner in (*model.modules(), *model.parameters()):
            for tensor in _tensors_in(list(vars(owner).values())):
                add(tensor)
        copied: Any = copy.deepcopy(model, copies)
        for parameter in model.parameters():  # a 4-bit parameter's attributes are its quantisation and its module
            for name, value in vars(parameter).items():
                setattr(copies[id(parameter)], name, copy.deepcopy(value, copies))
    if "_original_forward" in vars(copied):  # accelerate's forward is a closure over the original model
        copied.forward = copied._original_forward
    return copied  # type: ignore[no-any-return]


def _tensors_in(value: Any) -> Iterator[Tensor]:
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, (list, tuple)):
        for item in value:
            yield from _tensors_in(item)
    elif type(value).__name__ == "QuantState":
        for item in vars(value).values():
            yield from _tensors_in(item)
