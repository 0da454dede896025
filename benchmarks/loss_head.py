"""The output layer with its loss: full logits, TRL's head and torch.nn.functional.linear_cross_entropy.

    python benchmarks/loss_head.py                             # 2,048 tokens of an 8B with a vocabulary of 128,256
    python benchmarks/loss_head.py --tokens 16384 --hidden 2560 --vocabulary 262144

Bytes are the peak above the inputs, products those of all tokens with the whole output layer, forward and backward: of
fake bf16 tensors as on a card, the output layer frozen as in LoRA. Seconds are of the CPU in fp32, at a sixteenth of each
size, the median of five. Needs no GPU and torch 2.13.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import torch
from torch.nn.functional import cross_entropy, linear_cross_entropy
from torch.utils.flop_counter import FlopCounterMode
from trl.kernels.chunked_logprob import ChunkedLogProbFunction

from finetune.compat.torch import fake_tensor_mode
from finetune.compat.trl import cuda_loss
from finetune.memory.tracker import StorageTracker
from finetune.units import GIB

#: What TRL computes with each loss, for its logs.
LOGGED = ("entropy", "is_top1")
#: Columns of logits in one product, as TRL's `add_fused_lm_head` sets them.
CHUNK = 32768

Head = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]


def full_logits(hidden: torch.Tensor, weight: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    """The loss of all logits in fp32."""
    return cross_entropy((hidden @ weight.T).float(), targets)


def trls_head(hidden: torch.Tensor, weight: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    """SFTTrainer's loss, with what it logs."""
    return -ChunkedLogProbFunction.apply(hidden, weight, None, targets, 1.0, CHUNK, None, 1.0, LOGGED)[0].mean()


def torchs_function(hidden: torch.Tensor, weight: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    """linear_cross_entropy in chunks of tokens. On fake tensors the function in its custom operator, which hides its chunks."""
    from torch.nn.modules import linear_cross_entropy as module

    options = torch.nn.LinearCrossEntropyOptions()
    if not isinstance(hidden, torch._subclasses.FakeTensor):
        return linear_cross_entropy(hidden, weight, targets, options=options)
    size = {"num_batches": len(hidden), "in_features": hidden.shape[1], "num_classes": len(weight)}
    chosen = options._adjust(**size, dtype=hidden.dtype, device=torch.device("cuda"))
    chunks = (chosen.batch_chunk_size, chosen.acc_policy, chosen.acc_dtype)
    return module._linear_cross_entropy_batch_chunked_accumulator(
        hidden, weight, targets, None, None, "mean", -100, 0.0, *chunks, True, False, False
    )[0]


HEADS: dict[str, Head] = {"full logits": full_logits, "TRL's head": trls_head, "linear_cross_entropy": torchs_function}


def inputs(tokens: int, hidden: int, vocabulary: int, **more: Any) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Hidden states with gradients, the frozen output layer, targets."""
    states = torch.randn(tokens, hidden, requires_grad=True, **more)
    return states, torch.randn(vocabulary, hidden, **more), torch.randint(vocabulary, (tokens,))


def run(head: Head, values: tuple[torch.Tensor, torch.Tensor, torch.Tensor]) -> None:
    """Forward and, where the head has not computed the gradient already, backward."""
    loss = head(*values)
    if loss.requires_grad:
        loss.backward()


def peak_bytes(head: Head, size: tuple[int, int, int]) -> int:
    """Peak above the inputs, on a card."""
    with fake_tensor_mode(), cuda_loss(), StorageTracker() as tracker:
        values = inputs(*size, dtype=torch.bfloat16)
        tracker.phase = "loss"
        with torch.no_grad() if head is torchs_function else nullcontext():
            run(head, values)
    return max(peak.total_bytes for peak in tracker.peaks.values()) - sum(value.nbytes for value in values)


def products(head: Head, size: tuple[int, int, int]) -> float:
    """How often all tokens are multiplied with the output layer."""
    in_place = {torch.ops.aten.addmm_: lambda out, a, b, **_: 2 * a[0] * a[1] * b[1]}
    with fake_tensor_mode(), FlopCounterMode(display=False, custom_mapping=in_place) as counter:
        values = inputs(*size, dtype=torch.bfloat16)
        with torch.no_grad() if head is torchs_function else nullcontext():
            run(head, values)
    return counter.get_total_flops() / (2 * size[0] * size[1] * size[2])


def seconds(head: Head, size: tuple[int, int, int]) -> float:
    """Median of the CPU's seconds."""
    values, taken = inputs(*size), []
    for _ in range(6):
        start = time.process_time()
        run(head, values)
        taken.append(time.process_time() - start)
    return statistics.median(taken[1:])


def main() -> None:
    """Print a line for each head."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name, default in (("tokens", 2048), ("hidden", 4096), ("vocabulary", 128256)):
        parser.add_argument(f"--{name}", type=int, default=default)
    options = parser.parse_args()
    size = (options.tokens, options.hidden, options.vocabulary)
    torch.set_num_threads(1)
    for name, head in HEADS.items():
        print(
            f"{name:22} peak {peak_bytes(head, size) / GIB:6.3f} GiB  {products(head, size):.2f} products  "
            f"{seconds(head, tuple(max(64, value // 16) for value in size)):.3f} s of the CPU"
        )


if __name__ == "__main__":
    main()
