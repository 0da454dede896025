"""Merging has one tensor in memory, not the model: host memory above the interpreter is below 1.3 x the largest file."""

import json
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


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A folder with a model of zeros in several files, and an adapter of all its linear layers."""
    folder = tmp_path_factory.mktemp("model")
    config = LlamaConfig(  # so large that the 100 MB which a process takes besides are little
        vocab_size=8192, hidden_size=1024, intermediate_size=4096, num_hidden_layers=21, num_attention_heads=8,
        num_key_value_heads=2, tie_word_embeddings=False,
    )  # fmt: skip
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    model.to_empty(device="cpu")
    for parameter in model.parameters():
        parameter.data.zero_()
    model.save_pretrained(folder / "base", max_shard_size="300MB")
    with torch.no_grad():
        model = get_peft_model(model, LoraConfig(r=16, target_modules="all-linear"))
        for name, values in model.named_parameters():
            if "lora_B" in name:
                values.normal_(0, 0.01)
        model.save_pretrained(folder / "adapter")
    return folder


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


@pytest.mark.skipif(not Path("/proc/self/clear_refs").exists(), reason="peak memory is read as Linux has it")
def test_memory_above_the_interpreter_is_below_the_largest_file(folder):
    process = subprocess.run([sys.executable, __file__, str(folder)], capture_output=True, text=True, check=True)
    report = json.loads(process.stdout.splitlines()[-1])
    assert report["files"] >= 3 and report["changed"] == 21 * 7
    assert report["above_bytes"] <= 1.3 * report["largest_bytes"], report


if __name__ == "__main__":
    measure(Path(sys.argv[1]))
