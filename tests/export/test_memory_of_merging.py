"""Merging has one tensor in memory, not the model: host memory above the interpreter is below 1.3 x the largest file.

With a model of another size, here one of 3B:  python tests/export/test_memory_of_merging.py FOLDER 3072 8192 28 128256 5GB
"""

import json
import os
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest
import torch
from peft import LoraConfig, get_peft_model
from transformers import AutoModelForCausalLM, LlamaConfig

from finetune.export.merge import merged_tensors, stored_tensors, with_adapter, write_tensors

pytestmark = pytest.mark.slow


def make(folder, hidden_size, intermediate_size, layers, vocab_size, max_shard_size):
    """Write a model of zeros in files of at most `max_shard_size`, and an adapter of all its linear layers."""
    heads = hidden_size // 128
    config = LlamaConfig(
        vocab_size=vocab_size, hidden_size=hidden_size, intermediate_size=intermediate_size, num_hidden_layers=layers,
        num_attention_heads=heads, num_key_value_heads=max(1, heads // 4), tie_word_embeddings=False,
    )  # fmt: skip
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    model.to_empty(device="cpu")
    for parameter in model.parameters():
        parameter.data.zero_()
    model.save_pretrained(folder / "base", max_shard_size=max_shard_size)
    with torch.no_grad():
        model = get_peft_model(model, LoraConfig(r=16, target_modules="all-linear"))
        for name, values in model.named_parameters():
            if "lora_B" in name:
                values.normal_(0, 0.01)
        model.save_pretrained(folder / "adapter")


def measure(folder):
    """Merge, in a separate process; prints the memory and the time."""
    empty = AutoModelForCausalLM.from_pretrained(folder / "base", device_map={"": "meta"})
    tensors = stored_tensors(folder / "base")
    bytes_before = psutil.Process().memory_info().rss
    Path("/proc/self/clear_refs").write_text("5")  # the peak of making the model is not that of merging
    started = time.monotonic()
    merged = merged_tensors(with_adapter(empty, folder / "adapter"), tensors)
    (folder / "merged").mkdir()
    write_tensors(merged, folder / "merged")
    (folder / "merged" / "config.json").write_bytes((folder / "base" / "config.json").read_bytes())
    sizes = [path.stat().st_size for path in (folder / "base").glob("*.safetensors")]
    report = {
        "changed": sum(tensor is not before for tensor, before in zip(merged, tensors, strict=True)),
        "above_bytes": peak_bytes() - bytes_before,
        "largest_bytes": max(sizes),
        "model_bytes": sum(sizes),
        "files": len(sizes),
    }
    sys.stdout.write(json.dumps({**report, "seconds": round(time.monotonic() - started, 1)}))


def peak_bytes():
    [line] = [line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith("VmHWM")]
    return int(line.split()[1]) * 1024


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    folder = tmp_path_factory.mktemp("model")
    make(folder, 1024, 4096, 21, 8192, "300MB")  # what a process takes besides is some 100 MB
    return folder


@pytest.mark.skipif(not Path("/proc/self/clear_refs").exists(), reason="peak memory is read as Linux has it")
def test_memory_above_the_interpreter_is_below_the_largest_file(model):
    process = subprocess.run([sys.executable, __file__, str(model)], capture_output=True, text=True, check=True)
    report = json.loads(process.stdout.splitlines()[-1])
    assert report["files"] >= 3 and report["changed"] == 21 * 7
    assert report["above_bytes"] <= 1.3 * report["largest_bytes"], report


if __name__ == "__main__":
    folder = Path(sys.argv[1])
    if len(sys.argv) > 2:
        make(folder, *map(int, sys.argv[2:6]), sys.argv[6])
        os.execv(sys.executable, [sys.executable, __file__, str(folder)])
    measure(folder)
