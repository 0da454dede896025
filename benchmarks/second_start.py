"""Seconds and memory to load a random 4-bit model of 200M parameters: quantised at the first start, read at the second.

    python benchmarks/second_start.py            # on the processor; --device cuda

Target: the second start loads in less than 2 s. Prints one line of JSON for each start, and the seconds of loading without a
file. Each start is a process of its own; what it imports before it loads is not counted.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import time
from pathlib import Path

SETTINGS = {"load_in_4bit": True, "load_in_8bit": False, "dtype": "bfloat16", "attn_implementation": "sdpa"}
SIZES = {
    "hidden_size": 1024, "intermediate_size": 4096, "num_hidden_layers": 12, "num_attention_heads": 16,
    "num_key_value_heads": 8, "vocab_size": 8192, "tie_word_embeddings": True,
}  # fmt: skip


def main() -> None:
    """Make the model, then start three processes one after another."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--start", help=argparse.SUPPRESS)
    parser.add_argument("--folder", type=Path, help=argparse.SUPPRESS)
    chosen = parser.parse_args()
    if chosen.start:
        print(json.dumps(started(chosen.start, chosen.folder, chosen.device)))  # noqa: T201
        return
    with tempfile.TemporaryDirectory() as folder:
        save(Path(folder) / "model")
        for start in ("without a file", "first", "second"):
            command = [sys.executable, __file__, "--start", start, "--folder", folder, "--device", chosen.device]
            subprocess.run(command, check=True)


def save(path: Path) -> None:
    """A model with random weights."""
    import torch
    from transformers import AutoModelForCausalLM, LlamaConfig

    torch.manual_seed(0)
    AutoModelForCausalLM.from_config(LlamaConfig(**SIZES), dtype=torch.bfloat16).save_pretrained(path)


def started(start: str, folder: Path, device: str) -> dict[str, object]:
    """Load the model; returns seconds, and this process's own memory in bytes before and after."""
    import os

    os.environ["FINETUNE_CACHE"] = str(folder / "cache")
    import psutil

    from finetune.model.build import build_base
    from finetune.model.quantised_cache import base_from, open_store
    from finetune.model.transformers_config import load_config
    from finetune.recipe import recipe_from
    from finetune.settings import plainest

    def settings(name: str) -> object:
        return plainest(recipe_from({"model_name_or_path": name, "dataset": "rows.jsonl", **SETTINGS}))

    tiny, chosen = settings("tiny"), settings(str(folder / "model"))
    build_base(tiny, load_config(tiny), device=device, weights=True)  # type: ignore[arg-type]  # what is imported on first use
    config, before = load_config(chosen), psutil.Process().memory_info().rss  # type: ignore[arg-type]
    began = time.perf_counter()
    if start == "without a file":
        model = build_base(chosen, config, device=device, weights=True)  # type: ignore[arg-type]
    else:
        model = base_from(open_store(chosen, config, device, lambda _: None), chosen, config, device)  # type: ignore[arg-type]
    took_s, after = time.perf_counter() - began, psutil.Process().memory_info().rss
    codes = sum(parameter.numel() for parameter in model.parameters() if hasattr(parameter, "quant_state"))
    others = sum(parameter.numel() for parameter in model.parameters() if not hasattr(parameter, "quant_state"))
    return {
        "start": start, "parameters": 2 * codes + others, "load_s": round(took_s, 3), "resident_bytes_more": after - before,
    }  # fmt: skip


if __name__ == "__main__":
    main()
