"""Merging holds a tensor, not the model: host memory above the interpreter is far below 1.3 x the largest file.

With a model of another size, here one of 3B:  python tests/export/test_memory_of_merging.py FOLDER 3072 8192 28 128256 5GB
"""

import json
import os
import resource
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from peft import LoraConfig, get_peft_model
from transformers import AutoModelForCausalLM, LlamaConfig

from finetune.export.shards import Changes, stored_tensors, with_adapter, write_shards

pytestmark = pytest.mark.slow


def make(folder, hidden, inner, layers, words, most):
    """A random model in files of at most `most`, written layer by layer, and an adapter of all its linear layers."""
    heads = hidden // 128
    sizes = {"vocab_size": words, "hidden_size": hidden, "intermediate_size": inner, "num_hidden_layers": layers}
    of_heads = {"num_attention_heads": heads, "num_key_value_heads": max(1, heads // 4)}
    config = LlamaConfig(**sizes, **of_heads, tie_word_embeddings=False)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    model.save_pretrained(folder / "base", max_shard_size=most)
    with torch.no_grad():
        model = get_peft_model(model, LoraConfig(r=16, target_modules="all-linear"))
        for name, values in model.named_parameters():
            if "lora_B" in name:
                values.normal_(0, 0.01)
        model.save_pretrained(folder / "adapter")


def measure(folder):
    """Merge, in a process of its own; prints what it took."""
    empty = AutoModelForCausalLM.from_pretrained(folder / "base", device_map={"": "meta"})
    tensors = stored_tensors(folder / "base")
    before = current_bytes()
    Path("/proc/self/clear_refs").write_text("5")  # the peak of making the model is not that of merging
    began = time.monotonic()
    changes = Changes(with_adapter(empty, folder / "adapter"), tensors)
    (folder / "merged").mkdir()
    write_shards(tensors, changes, folder / "merged", most_bytes=None, progress=lambda _: None)
    (folder / "merged" / "config.json").write_bytes((folder / "base" / "config.json").read_bytes())
    sizes = [path.stat().st_size for path in (folder / "base").glob("*.safetensors")]
    took = {"above_bytes": peak_bytes() - before, "largest_bytes": max(sizes), "model_bytes": sum(sizes), "files": len(sizes)}
    sys.stdout.write(json.dumps({**took, "seconds": round(time.monotonic() - began, 1), "changed": len(changes)}))


def current_bytes():
    return int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize()


def peak_bytes():
    [line] = [line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith("VmHWM")]
    return int(line.split()[1]) * 1024


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    folder = tmp_path_factory.mktemp("model")
    make(folder, 1024, 4096, 28, 8192, "300MB")  # what a process takes besides is some 100 MB
    return folder


@pytest.mark.skipif(not Path("/proc/self/clear_refs").exists(), reason="peak memory is read as Linux has it")
def test_memory_above_the_interpreter_is_below_the_largest_file(model):
    done = subprocess.run([sys.executable, __file__, str(model)], capture_output=True, text=True, check=True)
    took = json.loads(done.stdout.splitlines()[-1])
    assert took["files"] >= 3 and took["changed"] == 28 * 7
    assert took["above_bytes"] <= 1.3 * took["largest_bytes"], took
    whole = AutoModelForCausalLM.from_pretrained(model / "base")
    from peft import PeftModel

    whole = PeftModel.from_pretrained(whole, model / "adapter").merge_and_unload(safe_merge=True)
    ids = torch.arange(16)[None]
    with torch.no_grad():
        assert torch.equal(AutoModelForCausalLM.from_pretrained(model / "merged")(ids).logits, whole(ids).logits)


if __name__ == "__main__":
    place = Path(sys.argv[1])
    if len(sys.argv) > 2:
        make(place, *map(int, sys.argv[2:6]), sys.argv[6])
        os.execv(sys.executable, [sys.executable, __file__, str(place)])
    measure(place)
