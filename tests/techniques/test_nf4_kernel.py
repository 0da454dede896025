"""The Triton kernel for NF4 weights, run by Triton's interpreter, gives bitsandbytes' bits on a CPU."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

CODE = """
import bitsandbytes.functional as bnb
import torch

from finetune.layers.nf4_kernel import dequantise

#: One block, blocks that end within a program, several programs, and more than a block of nested scales.
SHAPES = ((1, 64), (3, 64), (40, 96), (33, 64), (130, 256))

levels = bnb.get_4bit_type("nf4", device="cpu")
count = 0
for rows, columns in SHAPES:
    for block in (64, 128):
        for is_nested in (False, True):
            weight = torch.randn(rows, columns, generator=torch.Generator().manual_seed(rows)) * 0.05
            packed, state = bnb.quantize_4bit(weight, blocksize=block, quant_type="nf4", compress_statistics=is_nested)
            nested = (state.state2.absmax, state.state2.code, state.offset) if is_nested else ()
            for dtype in (torch.float32, torch.float16):  # the interpreter rounds to bfloat16 by cutting
                state.dtype = dtype
                out = torch.full((rows, columns), float("nan"), dtype=dtype)
                dequantise(packed, state.absmax, nested, levels, out, block)
                assert torch.equal(out, bnb.dequantize_4bit(packed, state)), (rows, columns, block, is_nested, dtype)
                count += 1
print(count)
"""


@pytest.mark.standin
def test_the_kernel_gives_the_bits_of_bitsandbytes_for_all_shapes():
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[2]), "TRITON_INTERPRET": "1"}
    process = subprocess.run([sys.executable, "-c", CODE], env=environment, capture_output=True, text=True, check=False)
    assert process.returncode == 0, process.stderr
    assert process.stdout.split()[-1] == "40"
