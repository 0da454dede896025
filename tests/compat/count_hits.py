"""`python count_hits.py OUT`: counts what the libraries call in dry runs, a training and the doctor's probe. Not a test.

Writes to OUT, as JSON, how often a library called or read each patched or overridden name.
"""

import functools
import json
import sys
from collections import Counter
from pathlib import Path

from patched_names import OVERRIDDEN, PATCHED, UNSEEN

import finetune.compat
from finetune.memory.forecast import RowShape

hits: Counter[str] = Counter()


def count(name: str) -> None:
    """Count a use of `name` when the caller is a library."""
    asking = sys._getframe(2).f_globals.get("__name__", "").partition(".")[0]
    if asking not in ("finetune", "__main__"):
        hits[name] += 1


def counted(name, value):
    if not callable(value):
        hits[name] += isinstance(value, int)  # its reading can't be counted
        return CountedBook(name, value) if isinstance(value, dict) else value

    @functools.wraps(value)
    def function(*arguments, **named):
        count(name)
        return value(*arguments, **named)

    return function


class CountedBook(dict):
    def __init__(self, name, values):
        super().__init__(values)
        self.name = name

    def __getitem__(self, key):
        count(self.name)
        return super().__getitem__(key)


def put(owner, attribute, value):
    names = [name for name in PATCHED if name.endswith(f".{attribute}") and finetune.compat.owner_of(name)[0] is owner]
    setattr(owner, attribute, counted(names[0], value) if names else value)


def probe():
    import torch

    from finetune.doctor.probe import try_bitsandbytes

    compile_ = torch.compile
    assert try_bitsandbytes().state == "ok"
    torch.compile = compile_


def dry_runs():
    from finetune.memory import simulate
    from finetune.memory.ledger import LargestStep

    simulate._tagged_checkpoint = counted(CHECKPOINT, simulate._tagged_checkpoint)
    small = {
        "model_type": "llama", "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4,
        "num_key_value_heads": 2, "vocab_size": 320, "max_position_embeddings": 256,
    }  # fmt: skip
    away = {"layer_offloading": "cpu", "offloaded_layers": 2}
    for kind in ({"load_in_4bit": True, "use_dora": True, "optim": "paged_adamw_8bit", **away}, {"load_in_8bit": True}):
        settings = resolve_plain(recipe_from({**RESOLVED, **kind}))
        assert LargestStep(small, settings, RowShape(128), (7, 5)).dry_run().allocated_bytes > 0
    experts = {"model_type": "qwen3_moe", "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
    for kind in ({"dtype": "float16"}, {"dtype": "float16", "load_in_4bit": True}):
        settings = resolve_plain(recipe_from({**RESOLVED, **kind}))
        assert LargestStep({**small, **experts}, settings, RowShape(128), (7, 5)).dry_run().allocated_bytes > 0


CHECKPOINT = "transformers.modeling_layers.GradientCheckpointingLayer._gradient_checkpointing_func"
RESOLVED = {
    "model_name_or_path": "some/model", "dataset": "rows.jsonl", "dtype": "float16", "load_in_4bit": False,
    "load_in_8bit": False, "lora_r": 8, "lora_alpha": 16, "target_modules": "all-linear", "packing": False,
    "per_device_train_batch_size": 1, "per_device_eval_batch_size": 1, "gradient_accumulation_steps": 1, "eval_steps": 10,
    "optim": "adamw_torch_fused", "activation_checkpointing": True, "activation_checkpointing_every_n_layers": 1,
    "learning_rate": 1e-4, "max_length": 128,
}  # fmt: skip


def training(folder):
    from finetune.compat.trl import compute_loss_without_triton
    from finetune.recipe import load_recipe
    from finetune.run.prepare import create_run, prepare
    from finetune.run.training import RunTrainer
    from finetune.run.worker import Worker

    for name in OVERRIDDEN:
        if name not in UNSEEN:
            method = name.rpartition(".")[2]
            setattr(RunTrainer, method, counted(name, vars(RunTrainer)[method]))
    short = [
        "max_steps=2", "save_steps=2", "eval_steps=2", "dataset.max_rows=16", "effective_batch_size=2", "lora_r=4",
        "per_device_train_batch_size=1", "activation_checkpointing=true", "layer_offloading=cpu",
    ]  # fmt: skip
    run = create_run(prepare(load_recipe("tiny-cpu", [*short, f"output_dir={folder / 'run'}"])))
    compute_loss_without_triton()
    assert Worker(run).main() == 0


if __name__ == "__main__":
    from finetune.recipe import recipe_from
    from finetune.settings import resolve_plain

    out = Path(sys.argv[1])
    finetune.compat._set = put
    probe()
    dry_runs()
    training(out.parent)
    out.write_text(json.dumps(hits))
