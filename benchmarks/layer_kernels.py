"""Kernels and time of a decoder layer's forward and backward: ordinary, lean, and lean with the model's own RoPE.

    python benchmarks/layer_kernels.py                              # fp32 on one thread of the processor, a small layer
    python benchmarks/layer_kernels.py --dtype bfloat16 --hidden 768 --tokens 512
    python benchmarks/layer_kernels.py --device cuda --dtype bfloat16 --hidden 4096 --tokens 2048    # on a card
    python benchmarks/layer_kernels.py --experts 128 --used 8 --tokens 16    # a mixture's layer, its experts in NF4

Kernels are operators that compute something.
Variants take turns; a ratio is the geometric mean of the turns' ratios to `lean`, with its 95 % interval.
"""

from __future__ import annotations

import argparse
import contextlib
import inspect
import math
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import BitsAndBytesConfig

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks.overhead import mean_ratio  # noqa: E402
from finetune.layers import lean_layers  # noqa: E402
from finetune.layers.experts import pack_experts  # noqa: E402
from finetune.layers.rotary import rotary_forward  # noqa: E402

#: Operators that compute nothing: views, and memory that is taken but not written.
FREE = {
    "alias", "as_strided", "chunk", "detach", "empty", "empty_like", "empty_strided", "expand", "new_empty",
    "new_empty_strided", "permute", "select", "slice", "split", "t", "transpose", "unsqueeze", "view",
    "_reshape_alias", "_unsafe_view",
}  # fmt: skip
#: Passes of a turn, after one that isn't timed.
PASSES = 3
OWN_ROPE = "lean, the model's own RoPE"
VARIANTS = ("ordinary", "lean", OWN_ROPE)


def main() -> None:
    """Measure all variants in turn and print the table."""
    arguments = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    arguments.add_argument("--device", default="cpu", choices=["cpu", "cuda"])
    arguments.add_argument("--dtype", default="float32", choices=["float32", "bfloat16", "float16"])
    for name, default in (("hidden", 256), ("tokens", 128), ("rank", 16), ("turns", 40), ("experts", 0), ("used", 8)):
        arguments.add_argument(f"--{name}", type=int, default=default)
    options = arguments.parse_args()
    torch.set_num_threads(1)
    layer, once = decoder_layer(options)
    variants = VARIANTS[:2] if options.experts else VARIANTS
    counts = {name: counted(name, layer, once) for name in variants}
    took: dict[str, list[float]] = {name: [] for name in variants}
    for turn in range(options.turns):
        for name in sorted(variants, reverse=turn % 2 == 1):
            with variant(name, layer):
                took[name].append(seconds(once, options.device))
    size = f"hidden {options.hidden}, {options.tokens} tokens, rank {options.rank}"
    kind = f"a mixture's layer, {options.used} of {options.experts} experts a token," if options.experts else "a Llama layer,"
    print(f"{kind} {size}, {options.dtype}, {options.device}")
    for name, times in took.items():
        milliseconds = 1000 * statistics.median(times)
        print(f"{name}: {counts[name]} kernels, {milliseconds:.2f} ms, / lean {ratio_of(times, took['lean'])}")
    if not options.experts:
        print(f"RoPE alone, lean / the model's own: {rotary_alone(options, layer)}")


def ratio_of(times: list[float], others: list[float]) -> str:
    """The ratio of the times of the same turns, with its interval, as text."""
    return mean_ratio([math.log(own / reference) for own, reference in zip(times, others, strict=True)])[0]


@contextlib.contextmanager
def variant(name: str, layer: torch.nn.Module) -> Iterator[None]:
    """Inside, the layer is of this variant."""
    own_rope = mock.patch("finetune.layers.lean_layers.rotary_forward", lambda module: None)
    with own_rope if name == OWN_ROPE else contextlib.nullcontext():
        (lean_layers.undo_lean if name == "ordinary" else lean_layers.make_lean)([layer])
        yield


def decoder_layer(options: argparse.Namespace) -> tuple[torch.nn.Module, Callable[[], None]]:
    """A layer with fp32 adapters on all its linear layers, of a mixture on attention's, and a function that runs a pass."""
    from peft import LoraConfig, get_peft_model
    from transformers import LlamaConfig, LlamaModel, Qwen3MoeConfig, Qwen3MoeModel

    torch.manual_seed(0)
    heads = max(1, options.hidden // 128)
    sizes: dict[str, Any] = {
        "hidden_size": options.hidden, "intermediate_size": options.hidden * 7 // 2, "num_hidden_layers": 1, "vocab_size": 16,
        "num_attention_heads": heads, "num_key_value_heads": max(1, heads // 4), "attn_implementation": "sdpa",
    }  # fmt: skip
    dtype = getattr(torch, options.dtype)
    if options.experts:
        routing = {"num_experts": options.experts, "num_experts_per_tok": options.used}
        inner = -(-options.hidden * 3 // 8 // 64) * 64  # as in Qwen3-30B-A3B, in whole blocks of NF4
        base: Any = Qwen3MoeModel(Qwen3MoeConfig(**sizes, **routing, moe_intermediate_size=inner)).to(options.device, dtype)
        for module in base.modules():
            if hasattr(module, "top_k"):
                torch.nn.init.normal_(module.weight)  # routes by the row
        pack_experts(base, BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_quant_type="nf4"), [])
        base.to(options.device)
    else:
        base = LlamaModel(LlamaConfig(**sizes)).to(options.device, dtype)
    targets = ["q_proj", "k_proj", "v_proj", "o_proj"] if options.experts else "all-linear"
    adapters = LoraConfig(r=options.rank, lora_alpha=2 * options.rank, target_modules=targets, init_lora_weights=False)
    model: Any = get_peft_model(base, adapters, autocast_adapter_dtype=True)  # type: ignore[arg-type]
    layer = model.base_model.model.layers[0].train()
    x = torch.randn(1, options.tokens, options.hidden, device=options.device, dtype=dtype, requires_grad=True)
    turns = base.rotary_emb(x, torch.arange(options.tokens, device=options.device)[None])
    grad = torch.randn_like(x)

    def once() -> None:
        with torch.autocast(options.device, dtype, enabled=dtype != torch.float32):
            layer(x, position_embeddings=turns).backward(grad)

    return layer, once


def rotary_alone(options: argparse.Namespace, layer: Any) -> str:
    """Forward and backward of RoPE for this layer's heads: the lean function's time beside the model's own."""
    dtype, functions = getattr(torch, options.dtype), inspect.unwrap(rotary_forward(layer.self_attn)).__globals__
    heads = [part.out_features // layer.self_attn.head_dim for part in (layer.self_attn.q_proj, layer.self_attn.k_proj)]
    shapes = [(1, options.tokens, count, layer.self_attn.head_dim) for count in heads]
    inputs = [torch.randn(shape, device=options.device, dtype=dtype).transpose(1, 2).requires_grad_() for shape in shapes]
    turns = torch.randn(2, 1, options.tokens, layer.self_attn.head_dim, device=options.device, dtype=dtype).unbind()
    grads = [torch.randn_like(head) for head in inputs]
    took: dict[str, list[float]] = {"own": [], "lean": []}
    for turn in range(options.turns):
        for name in sorted(took, reverse=turn % 2 == 1):
            function = functions[f"{'_lean_' * (name == 'lean')}apply_rotary_pos_emb"]
            took[name].append(
                seconds(lambda call=function: torch.autograd.grad(call(*inputs, *turns), inputs, grads), options.device)
            )
    return ratio_of(took["lean"], took["own"])


def counted(name: str, layer: torch.nn.Module, once: Callable[[], None]) -> int:
    """Operators of a pass that compute something."""
    with variant(name, layer):
        once()
        with Counted() as count:
            once()
    return count.kernels


class Counted(TorchDispatchMode):
    """Counts operators that compute something."""

    kernels = 0

    def __torch_dispatch__(self, function: Any, types: Any, arguments: Any = (), named: Any = None) -> Any:
        """Count it and call it."""
        self.kernels += function.overloadpacket.__name__ not in FREE
        return function(*arguments, **(named or {}))


def seconds(once: Callable[[], Any], device: str) -> float:
    """Seconds of a pass: of the thread on a processor, of the clock on a card."""
    clock = time.perf_counter if device == "cuda" else time.thread_time
    wait = torch.cuda.synchronize if device == "cuda" else (lambda: None)
    once()
    wait()
    began = clock()
    for _ in range(PASSES):
        once()
    wait()
    return (clock() - began) / PASSES


if __name__ == "__main__":
    main()
