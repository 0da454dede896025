"""A tiny Llama with adapters and a plain training loop, for comparing a technique with the run without it."""

import contextlib
import functools
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from transformers import LlamaConfig, LlamaForCausalLM

from finetune.compat.bitsandbytes import own_quantisation_maps
from finetune.memory.fake_model import materialise
from finetune.memory.tracker import StorageTracker
from finetune.model.adapters import attach_adapters, prepare_for_training
from finetune.model.build import build_base, model_dtype
from finetune.model.techniques import apply_techniques, optimizer_class, step_context
from finetune.model.transformers_config import load_config
from finetune.settings import Recipe, Settings, resolve_plain

VOCABULARY = 320
#: The two kinds of base that every technique has to work on.
BASES = {"lora": {"dtype": "float32"}, "nf4": {"dtype": "bfloat16", "load_in_4bit": True}}
#: What is recomputed.
RECOMPUTED = {
    "full": {"activation_checkpointing": True},
    "every-2": {"activation_checkpointing": True, "activation_checkpointing_every_n_layers": 2},
    "selective": {"activation_checkpointing": "selective"},
    "offload": {"activation_checkpointing": "offload"},
}
KINDS = ["lora", pytest.param("nf4", marks=pytest.mark.slow)]


def save_tiny_base(path: Path, hidden: int = 128, layers: int = 4, tied: bool = True) -> str:
    torch.manual_seed(0)
    config = LlamaConfig(
        hidden_size=hidden, intermediate_size=2 * hidden, num_hidden_layers=layers, num_attention_heads=4,
        num_key_value_heads=2, vocab_size=VOCABULARY, max_position_embeddings=256, tie_word_embeddings=tied,
    )  # fmt: skip
    LlamaForCausalLM(config).save_pretrained(path)
    return str(path)


def settings_for(base: str, **changes) -> Settings:
    values = {
        "model_name_or_path": base, "dataset": {"path": "rows.jsonl"}, "gpu": "cpu", "dtype": "float32",
        "attn_implementation": "sdpa", "max_length": 64, "packing": False, "load_in_4bit": False, "load_in_8bit": False,
        "lora_r": 8, "lora_alpha": 16.0, "target_modules": "all-linear", "effective_batch_size": 2,
        "per_device_train_batch_size": 2, "gradient_accumulation_steps": 1, "learning_rate": 3e-3, "optim": "adamw_torch_fused",
        "activation_checkpointing": False, "activation_checkpointing_every_n_layers": 1,
    }  # fmt: skip
    return resolve_plain(Recipe.model_validate(values | changes))


def adapted(settings: Recipe) -> torch.nn.Module:
    torch.manual_seed(1)
    model = attach_adapters(build_base(settings, load_config(settings), device="cpu", weights=True, offloads=True), settings)
    prepare_for_training(model, settings)
    return model


def batch(step: int, rows: int = 2, tokens: int = 64) -> dict[str, torch.Tensor]:
    ids = torch.randint(0, VOCABULARY, (rows, tokens), generator=torch.Generator().manual_seed(100 + step))
    ids[:, 1::2] = ids[:, ::2]  # something to learn: every other token repeats
    return {"input_ids": ids, "labels": ids, "attention_mask": torch.ones_like(ids)}


def autocast(settings: Recipe) -> contextlib.AbstractContextManager:
    return contextlib.nullcontext() if settings.dtype == "float32" else torch.autocast("cpu", model_dtype(settings))


def trained(model: torch.nn.Module) -> list[torch.nn.Parameter]:
    return [parameter for parameter in model.parameters() if parameter.requires_grad]


def optimizer_of(model: torch.nn.Module, settings: Recipe) -> torch.optim.Optimizer:
    kind, arguments = optimizer_class(settings) or (
        torch.optim.AdamW,
        {"lr": settings.learning_rate, "weight_decay": 0.0, "fused": True},
    )
    return kind(trained(model), **arguments)


@functools.cache
def plain_losses(base: str, kind: str, steps: int = 4) -> list[float]:
    """Loss of each step of the run without any technique."""
    return losses(settings_for(base, **BASES[kind]), steps)


def losses(settings: Recipe, steps: int = 4) -> list[float]:
    """Loss of each step of a run, with everything the settings ask for."""
    model = adapted(settings)
    apply_techniques(model, settings)
    optimizer, seen = optimizer_of(model, settings), []
    for step in range(steps):
        with step_context(settings, "cpu"), autocast(settings):
            loss = model(**batch(step % 4)).loss
            loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), settings.max_grad_norm)
        optimizer.step()
        optimizer.zero_grad()
        seen.append(loss.item())
    return seen


def saved_bytes(settings: Recipe, model: torch.nn.Module | None = None) -> int:
    """Device bytes that a forward of the tiny model saves for backward."""
    model = adapted(settings) if model is None else model
    apply_techniques(model, settings)
    inputs, tracker = batch(0), StorageTracker()
    for tensor in (*model.parameters(), *model.buffers(), *inputs.values()):
        tracker.track(tensor)
    before = tracker.live_bytes
    with tracker, step_context(settings, "cpu"), autocast(settings):
        loss = model(**inputs).loss
        live_bytes = tracker.live_bytes - before
    del loss
    return live_bytes


@contextlib.contextmanager
def forecast_model(settings: Recipe) -> Iterator[torch.nn.Module]:
    """The model of a forecast, with fake tensors."""
    model = attach_adapters(build_base(settings, load_config(settings), device="cpu", weights=False), settings)
    with FakeTensorMode(), own_quantisation_maps():
        materialise(model, StorageTracker(), dtype=model_dtype(settings))
        model.train()
        yield model


def forecast_saved_bytes(base: str, kind: str, *forms: dict, **changes) -> list[int]:
    """The same for each of `forms` on fake tensors, without host memory."""
    changes = BASES[kind] | changes
    with forecast_model(settings_for(base, **changes)) as model:
        return [saved_bytes(settings_for(base, **changes, **form), model) for form in forms]


class Operators(TorchDispatchMode):
    """How often each operator runs, and the shapes of its results."""

    def __init__(self):
        super().__init__()
        self.counts, self.shapes = Counter(), set()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        self.counts[str(func)] += 1
        self.shapes |= {tensor.shape for tensor in tree_leaves(out) if isinstance(tensor, torch.Tensor)}
        return out
