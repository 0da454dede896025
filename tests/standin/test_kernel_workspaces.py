"""The workspaces that the forecast's rules add for attention's backward pass are those that torch allocates for each GPU."""

import pytest

pytestmark = pytest.mark.standin

CODE = """
import sys
import torch
from finetune.memory.rules import _efficient_scratch, _flash_scratch

aten, capability = torch.ops.aten, torch.cuda.get_device_capability()


def allocations(function):
    torch.cuda.memory._record_memory_history(stacks="python", context=None)
    function()
    events = torch.cuda.memory._snapshot()["device_traces"][0]
    torch.cuda.memory._record_memory_history(enabled=None)
    return [event["size"] for event in events if event["action"] == "alloc"]


def efficient(query, key, value, grad):
    out, *saved = aten._scaled_dot_product_efficient_attention(query, key, value, None, True, 0.0, True)
    wanted = [True, True, True, False]
    backward = aten._scaled_dot_product_efficient_attention_backward
    return allocations(lambda: backward(grad, query, key, value, None, out, *saved, 0.0, wanted, True)), _efficient_scratch(
        query, key, capability
    )


def flash(query, key, value, grad):
    out, logsumexp, *saved, seed, offset, _ = aten._scaled_dot_product_flash_attention(query, key, value, 0.0, True, False)
    backward = aten._scaled_dot_product_flash_attention_backward
    saved = (logsumexp, *saved, 0.0, True, seed, offset)
    return allocations(lambda: backward(grad, query, key, value, out, *saved)), _flash_scratch(query, key)


for dtype in (torch.float16, torch.bfloat16, torch.float32):
    half, modern = dtype != torch.float32, capability >= (8, 0)
    for kernel in (efficient, flash) if half and modern else (efficient,):
        for dim in (64, 80, 96, 128, 192, 256) if dtype != torch.bfloat16 or modern else ():
            for batch, heads, tokens in ((1, 12, 905), (2, 12, 905), (1, 32, 2048), (1, 4, 300)):
                tensors = [torch.empty(batch, heads, tokens, dim, dtype=dtype, device="cuda") for _ in range(4)]
                sizes, rule = kernel(*tensors)
                if not all(size in sizes for size in rule) or max(sizes) > max(*rule, tensors[0].nbytes):
                    print(kernel.__name__, dtype, dim, (batch, heads, tokens), sorted(sizes), rule)
"""


@pytest.mark.parametrize("gpu", ["t4", "rtx-5090", pytest.param("a100-80gb", marks=pytest.mark.exhaustive)])
def test_attentions_backward_takes_what_the_rules_say(standin, gpu):
    assert standin(gpu).python(CODE).stdout == ""
