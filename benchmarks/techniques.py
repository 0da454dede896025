"""Bytes saved for backward, optimizer bytes and losses of each memory technique, on a tiny Llama with NF4 QLoRA.

python benchmarks/techniques.py                     # on the CPU: bytes from fake tensors, losses from real steps
python benchmarks/techniques.py --device cuda       # real steps on the GPU, with measured peak and step time
python benchmarks/techniques.py --base lora --layers 8 --hidden 512 --tokens 512 --steps 20
"""

from __future__ import annotations

import argparse
import tempfile
import time
from dataclasses import dataclass
from typing import Any

import torch
from rich.console import Console
from rich.table import Table
from torch._subclasses.fake_tensor import FakeTensorMode
from transformers import LlamaConfig, LlamaForCausalLM
from transformers.trainer import Trainer
from transformers.training_args import TrainingArguments

from finetune.compat.bitsandbytes import own_quantisation_maps
from finetune.layers.host_memory import is_forecast
from finetune.memory.fake_model import materialise
from finetune.memory.tracker import StorageTracker
from finetune.model.adapters import attach_adapters, prepare_for_training
from finetune.model.build import build_base
from finetune.model.quantisation import model_dtype
from finetune.model.techniques import apply_techniques, optimizer_class, step_context, training_arguments
from finetune.model.transformers_config import load_config
from finetune.settings import Recipe, Settings, plainest
from finetune.units import KIB, format_bytes

TECHNIQUES: dict[str, dict[str, Any]] = {
    "nothing": {},
    "recompute every layer": {"activation_checkpointing": True},
    "recompute every 2nd layer": {"activation_checkpointing": True, "activation_checkpointing_every_n_layers": 2},
    "recompute, attention kept": {"activation_checkpointing": "selective"},
    "recompute, inputs on host": {"activation_checkpointing": "offload"},
    "activations on host": {"activation_offloading": True},
    "int8 activations": {"int8_activations": True},
    "int8 activations, recompute": {"int8_activations": True, "activation_checkpointing": True},
    "AdamW on host": {"optim": "adamw_cpu_offload"},
    "8-bit AdamW": {"optim": "adamw_8bit"},
    "paged 8-bit AdamW": {"optim": "paged_adamw_8bit"},
    "Adafactor": {"optim": "adafactor"},
}


@dataclass(frozen=True)
class Row:
    """One technique: bytes saved for backward, optimizer bytes on the card, losses; measured peak and step time on a GPU."""

    saved_bytes: int
    optimizer_bytes: int
    losses: list[float]
    peak_bytes: int | None
    step_s: float | None


def main() -> None:
    """Run every technique and print the table."""
    arguments = _arguments()
    with tempfile.TemporaryDirectory() as folder:
        _save_base(folder, arguments)
        rows = {name: _measure(_settings(folder, arguments, **changes), arguments) for name, changes in TECHNIQUES.items()}
    _print(rows, arguments)


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cpu", choices=["cpu", "cuda"])
    parser.add_argument("--base", default="nf4", choices=["nf4", "lora"], help="NF4 QLoRA or LoRA on 16-bit weights")
    for name, default in (("layers", 4), ("hidden", 192), ("rows", 2), ("tokens", 128), ("steps", 20), ("rank", 32)):
        parser.add_argument(f"--{name}", type=int, default=default)
    return parser.parse_args()


def _save_base(folder: str, arguments: argparse.Namespace) -> None:
    torch.manual_seed(0)
    heads = max(1, arguments.hidden // 32)
    config = LlamaConfig(
        hidden_size=arguments.hidden, intermediate_size=arguments.hidden * 8 // 3, num_hidden_layers=arguments.layers,
        num_attention_heads=heads, num_key_value_heads=heads // 2 or 1, vocab_size=640, tie_word_embeddings=True,
    )  # fmt: skip
    LlamaForCausalLM(config).save_pretrained(folder)


def _settings(folder: str, arguments: argparse.Namespace, **changes: Any) -> Settings:
    values = {
        "model_name_or_path": folder, "dataset": {"path": "unused.jsonl"}, "gpu": "cpu", "dtype": "bfloat16",
        "attn_implementation": "sdpa", "load_in_4bit": arguments.base == "nf4", "load_in_8bit": False, "lora_r": arguments.rank,
        "lora_alpha": 2.0 * arguments.rank, "target_modules": "all-linear", "learning_rate": 1e-3, "optim": "adamw_torch_fused",
        "activation_checkpointing": False, "activation_checkpointing_every_n_layers": 1,
    }  # fmt: skip
    return plainest(Recipe.model_validate(values | changes))


def _measure(settings: Recipe, arguments: argparse.Namespace) -> Row:
    saved_bytes, state = _bytes_without_data(settings, arguments)
    torch.manual_seed(1)
    model = attach_adapters(build_base(settings, load_config(settings), device=arguments.device, weights=True), settings)
    prepare_for_training(model, settings)
    apply_techniques(model, settings)
    optimizer, losses, times = _optimizer(model, settings, arguments), [], []
    on_gpu = arguments.device == "cuda"
    if on_gpu:
        torch.cuda.reset_peak_memory_stats()
    for step in range(arguments.steps):
        began = time.perf_counter()
        with step_context(settings, arguments.device):
            loss = _loss(model, _batch(step, arguments, arguments.device), arguments.device)
            loss.backward()
        torch.nn.utils.clip_grad_norm_([p for p in model.parameters() if p.requires_grad], 1.0)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
        times.append(time.perf_counter() - began)
    settled = sorted(times[len(times) // 2 :])
    peak = torch.cuda.max_memory_allocated() if on_gpu else None
    return Row(saved_bytes, state, losses, peak, settled[len(settled) // 2] if on_gpu else None)


def _bytes_without_data(settings: Recipe, arguments: argparse.Namespace) -> tuple[int, int]:
    """Device bytes saved for backward, and those of the optimizer after a step; host memory is not counted."""
    model = attach_adapters(build_base(settings, load_config(settings), device="cpu", weights=False), settings)
    with FakeTensorMode(), own_quantisation_maps(), StorageTracker() as tracker:
        materialise(model, tracker, dtype=model_dtype(settings))
        model.train()
        apply_techniques(model, settings)
        optimizer, batch = _optimizer(model, settings, arguments), _batch(0, arguments, "cpu")
        before = tracker.live_bytes
        with step_context(settings, "cpu"):
            loss = _loss(model, batch, "cpu")
            saved_bytes = tracker.live_bytes - before
            loss.backward()
        del loss
        before = tracker.live_bytes
        optimizer.step()
        return saved_bytes, tracker.live_bytes - before


def _optimizer(model: torch.nn.Module, settings: Recipe, arguments: argparse.Namespace) -> torch.optim.Optimizer:
    """The optimizer as Trainer makes it."""
    own = optimizer_class(settings)
    if own is None:
        with tempfile.TemporaryDirectory() as folder:
            args = TrainingArguments(
                output_dir=folder, learning_rate=settings.learning_rate, use_cpu=arguments.device == "cpu",
                optim=training_arguments(settings)["optim"],
            )  # fmt: skip
        own = Trainer.get_optimizer_cls_and_kwargs(args)
    kind, named = own
    parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
    return kind([{"params": parameters, "weight_decay": settings.weight_decay}], **named)


def _batch(step: int, arguments: argparse.Namespace, device: str) -> dict[str, torch.Tensor]:
    ids = torch.zeros(arguments.rows, arguments.tokens, dtype=torch.long)
    if not is_forecast(ids):
        ids.random_(0, 640, generator=torch.Generator().manual_seed(step))
        ids[:, 1::2] = ids[:, ::2]  # something to learn: every other token repeats
    return {"input_ids": ids.to(device), "labels": ids.to(device)}


def _loss(model: torch.nn.Module, batch: dict[str, torch.Tensor], device: str) -> torch.Tensor:
    with torch.autocast(device, torch.bfloat16):
        return model(**batch).loss


def _print(rows: dict[str, Row], arguments: argparse.Namespace) -> None:
    plain = rows["nothing"]
    table = Table(
        title=f"{arguments.base}, {arguments.rows} x {arguments.tokens} tokens, {arguments.steps} steps on {arguments.device}"
    )
    columns = ["technique", "kept for backward", "saved", "optimizer", "last loss", "largest loss difference"]
    for name in columns + (["measured peak", "step"] if plain.peak_bytes is not None else []):
        table.add_column(name, justify="left" if name == "technique" else "right")
    for name, row in rows.items():
        worst = max(abs(ours - theirs) for ours, theirs in zip(row.losses, plain.losses, strict=True))
        saved, difference = 1 - row.saved_bytes / plain.saved_bytes, "0" if worst == 0 else f"{worst:.1e}"
        cells = [name, f"{row.saved_bytes / KIB:,.0f} KiB", f"{saved:.1%}", f"{row.optimizer_bytes / KIB:,.0f} KiB"]
        cells += [f"{row.losses[-1]:.4f}", difference]
        measured = [format_bytes(row.peak_bytes), f"{1000 * row.step_s:.0f} ms"] if row.step_s is not None else []
        table.add_row(*cells, *measured)
    Console(width=140).print(table)


if __name__ == "__main__":
    main()
