"""The cells of card_matrix.py: which models, settings, rows and GPUs the forecast is compared with."""

from __future__ import annotations

import functools
import itertools
import json
import random
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

#: Settings that are the same in every cell unless it names others.
USUAL: dict[str, Any] = {
    "effective_batch_size": 4, "per_device_train_batch_size": 2, "max_steps": 3, "eval_steps": 2, "save_steps": 2,
    "sample_answers": 0, "max_length": 1024, "gpu": "auto", "lora_r": 16, "optim": "adamw_torch",
    "load_in_4bit": False, "load_in_8bit": False, "activation_checkpointing": False, "layer_offloading": False,
    "offload_embeddings": False, "packing": False, "dataset.test_split_size": 4,
}  # fmt: skip
#: Those of them that a cell has whose settings the planner chooses.
ALWAYS = ("max_steps", "eval_steps", "save_steps", "sample_answers", "gpu", "dataset.test_split_size")
FORMATS: dict[str, dict[str, Any]] = {"16 bit": {}, "NF4": {"load_in_4bit": True}, "int8": {"load_in_8bit": True}}
#: A technique for mixtures.
ADAPTED_EXPERTS = "adapters on experts, every layer"
TECHNIQUES: dict[str, dict[str, Any]] = {
    "nothing recomputed": {},
    "every layer": {"activation_checkpointing": True, "activation_checkpointing_every_n_layers": 1},
    "every 2nd layer": {"activation_checkpointing": True, "activation_checkpointing_every_n_layers": 2},
    "all but attention": {"activation_checkpointing": "selective"},
    "checkpoints in host memory": {"activation_checkpointing": "offload"},
    "embeddings in host memory": {"offload_embeddings": True},
    "layers in host memory": {
        "activation_checkpointing": True,
        "activation_checkpointing_every_n_layers": 1,
        "layer_offloading": "cpu",
    },
    "8-bit Adam": {"optim": "adamw_8bit"},
    "paged 8-bit Adam": {"optim": "paged_adamw_8bit"},
    "rank 128": {"lora_r": 128},
    "DoRA": {"use_dora": True},
    "no lean layers": {"lean_layers": False},
    "eager attention": {"attn_implementation": "eager"},
    "packed": {"packing": True, "per_device_train_batch_size": 1},
    "one row": {"per_device_train_batch_size": 1},
    "all tokens trained": {"train_on_inputs": True},
}
TECHNIQUES[ADAPTED_EXPERTS] = {"target_modules": ["q_proj", "gate_up_proj", "down_proj"], **TECHNIQUES["every layer"]}
#: DPO: a pair is two sequences.
PAIRS: dict[str, dict[str, Any]] = {
    "pairs": {"method": "dpo", "per_device_train_batch_size": 1},
    "pairs, every layer": {"method": "dpo", **TECHNIQUES["every layer"]},
}
#: What most models are tried with, and what compiled layers are.
PLAIN = ("nothing recomputed", "every layer")
RECOMPUTED = (*PLAIN, "every 2nd layer", "checkpoints in host memory", "all but attention")
#: A technique for models whose output layer does not read the embeddings.
UNTIED_ONLY = "embeddings in host memory"
#: Model -> GPU on which its cells run, the largest first where 16 bit needs it.
FAMILIES = {
    "Qwen/Qwen2.5-0.5B-Instruct": "rtx-4060",  # tied embeddings
    "meta-llama/Llama-3.2-1B-Instruct": "rtx-3060",  # tied, 128k tokens
    "Qwen/Qwen3-4B": "rtx-3090",
    "Qwen/Qwen3-8B": "a100-40gb",
    "google/gemma-3-4b-it": "rtx-5090",  # text of a multimodal model, sliding windows
    "Qwen/Qwen3-VL-4B-Instruct": "rtx-5090",
    "Qwen/Qwen3.5-4B": "rtx-5090",  # hybrid: linear attention
    "Qwen/Qwen3-30B-A3B": "a100-80gb",  # mixture
}
#: Recipes whose settings the planner chooses, by GPU.
PLANNED = (
    ("Qwen/Qwen2.5-7B-Instruct", "rtx-4090"), ("meta-llama/Llama-3.1-8B-Instruct", "rtx-3090"), ("Qwen/Qwen3-8B", "rtx-3060"),
    ("Qwen/Qwen2.5-7B-Instruct", "t4"), ("Qwen/Qwen3-8B", "l4"), ("Qwen/Qwen3-8B", "rtx-5090"), ("Qwen/Qwen3-8B", "rtx-4060"),
    ("Qwen/Qwen3-14B", "rtx-4090"), ("Qwen/Qwen3-32B", "rtx-4090"), ("Qwen/Qwen3-32B", "a100-80gb"),
    ("meta-llama/Llama-3.3-70B-Instruct", "h100-80gb"), ("meta-llama/Llama-3.3-70B-Instruct", "rtx-4090"),
)  # fmt: skip


@dataclass(frozen=True)
class Cell:
    """A run with `settings` beyond USUAL, a kind of rows, and the parts of its name.

    `layers`: the model's first layers, None for all.
    """

    model: str
    gpu: str
    base_format: str
    technique: str
    rows: str = "uneven"  # even, uneven, pairs
    expandable: bool = True
    settings: dict[str, Any] = field(default_factory=dict, compare=False)
    layers: int | None = None

    @property
    def model_name(self) -> str:
        """The model, with its number of layers where these are not all."""
        return f"{self.model}, {self.layers} layers" if self.layers else self.model

    @property
    def planned(self) -> bool:
        """Whether the planner chooses the settings."""
        return self.base_format == "planned"

    @property
    def columns(self) -> dict[str, str]:
        """The columns of a table that name a cell."""
        return {
            "model": self.model_name, "gpu": self.gpu, "base_format": self.base_format, "technique": self.technique,
            "rows": self.rows, "segments": "expandable" if self.expandable else "segments",
        }  # fmt: skip

    @property
    def name(self) -> str:
        """Unique among all cells."""
        return " | ".join(self.columns.values())

    def recipe(self, rows: Path, output: Path) -> list[str]:
        """The cell as `key=value` of a recipe."""
        usual = {name: USUAL[name] for name in ALWAYS} if self.planned else USUAL
        values = {**usual, **self.settings, "dataset.path": str(rows), "output_dir": str(output)}
        return [f"{name}={json.dumps(value)}" for name, value in values.items()]


def cell_of(model: str, gpu: str, base_format: str, technique: str, rows: str = "uneven", **more: Any) -> Cell:
    """The cell of a format and a technique, whose settings follow from both; pairs are also a kind of rows."""
    settings = {**FORMATS[base_format], **TECHNIQUES.get(technique, {}), **PAIRS.get(technique, {}), **more.pop("settings", {})}
    return Cell(model, gpu, base_format, technique, "pairs" if technique in PAIRS else rows, settings=settings, **more)


def all_cells() -> list[Cell]:
    """Every cell, the most informative first."""
    small, untied = "Qwen/Qwen2.5-1.5B-Instruct", "Qwen/Qwen2.5-7B-Instruct"
    of_small = [name for name in TECHNIQUES if name not in (UNTIED_ONLY, ADAPTED_EXPERTS)]
    cells = few_layers()
    cells += [cell_of(small, "rtx-4090", base, technique) for base in FORMATS for technique in of_small]
    cells += [cell_of(untied, "a100-40gb", base, UNTIED_ONLY) for base in FORMATS]
    cells += [cell_of(small, "rtx-4090", base, name) for base in FORMATS for name in PAIRS]
    for model, gpu in FAMILIES.items():
        shorter = {"max_length": 512} if "30B" in model else {}
        cells += [cell_of(model, gpu, base, technique, settings=shorter) for base in FORMATS for technique in PLAIN]
    for base, rows, model in itertools.product(FORMATS, ("even", "uneven"), (small, "Qwen/Qwen3-4B")):
        settings = {**FORMATS[base], "activation_checkpointing": True}
        cells.append(Cell(model, "rtx-4090", base, "every layer", rows, False, settings))
        cells.append(cell_of(model, "rtx-4090", base, PLAIN[0], rows, expandable=False))
    cells += [Cell(model, gpu, "planned", "planned", rows) for model, gpu in PLANNED for rows in ("even", "uneven")]
    return list(dict.fromkeys(cells))


def few_layers() -> list[Cell]:
    """Cells that take seconds: tests/standin runs them on every change."""
    shown = [
        ("16 bit", "nothing recomputed"), ("16 bit", "every layer"), ("NF4", "nothing recomputed"), ("NF4", "every 2nd layer"),
        ("NF4", "8-bit Adam"), ("NF4", "packed"), ("NF4", "all tokens trained"), ("int8", "every layer"), ("16 bit", "pairs"),
        ("NF4", "pairs, every layer"),
    ]  # fmt: skip
    small = functools.partial(cell_of, "Qwen/Qwen2.5-1.5B-Instruct", layers=6)
    cells = [small("rtx-4090", base, technique) for base, technique in shown]
    cells.append(small("rtx-4090", "16 bit", "one row", "even", expandable=False))
    # a block for one segment is chosen
    cells += [small("rtx-4090", base, "nothing recomputed", expandable=False) for base in ("NF4", "int8")]
    cells.append(small("t4", "NF4", "every layer", "even"))
    for mixture in ("Qwen/Qwen3-30B-A3B", "unsloth/gpt-oss-20b-BF16"):
        cells.append(cell_of(mixture, "rtx-4090", "NF4", "nothing recomputed", layers=3))
        cells.append(cell_of(mixture, "rtx-4090", "NF4", ADAPTED_EXPERTS, "even", layers=3))
    hybrid = functools.partial(cell_of, "Qwen/Qwen3.5-4B", "rtx-4090", layers=4)
    cells += [hybrid("16 bit", technique, "even") for technique in reversed(PLAIN)]
    return [*cells, hybrid("NF4", "nothing recomputed")]


def compiled_cells() -> list[Cell]:
    """Compiled layers with each technique; unsupported combinations run as lean layers or are refused."""
    llama = "meta-llama/Llama-3.1-8B-Instruct"
    cells = []
    for base, technique in itertools.product(("NF4", "16 bit"), RECOMPUTED):
        cell = cell_of(llama, "rtx-4090", base, technique, layers=8)
        packed = {**cell.settings, **TECHNIQUES["packed"]}
        cells += [cell, replace(cell, technique=f"{technique}, packed", settings=packed)]
    singly: dict[str, dict[str, Any]] = {
        **PAIRS, "KTO": {"method": "kto"}, "dropout": {"lora_dropout": 0.05}, "DoRA": {},
        "dropout, every layer": {"lora_dropout": 0.05, **TECHNIQUES["every layer"]}, "layers in host memory": {},
        "int8": {**FORMATS["int8"], "load_in_4bit": False},
    }  # fmt: skip
    for name, values in singly.items():
        rows = "pairs" if "method" in values else "uneven"
        cells.append(cell_of(llama, "rtx-4090", "NF4", name, rows, layers=8, settings=values))
    for model, gpu, layers in (
        *(("Qwen/Qwen3-8B", gpu, 4) for gpu in ("t4", "rtx-3090", "rtx-5090", "h100-80gb")),
        ("google/gemma-3-4b-it", "rtx-4090", 6), ("mistralai/Mistral-7B-Instruct-v0.3", "rtx-4090", 4),
        ("microsoft/Phi-3.5-mini-instruct", "rtx-4090", 4), ("Qwen/Qwen3-30B-A3B", "rtx-4090", 3),
        ("unsloth/gpt-oss-20b-BF16", "rtx-4090", 3), (llama, "rtx-4090", 32),
    ):  # fmt: skip
        cells += [cell_of(model, gpu, "NF4", technique, layers=layers) for technique in PLAIN]
    return [replace(cell, settings={**cell.settings, "torch_compile": True}) for cell in cells]


def write_rows(path: Path, kind: str, seed: int = 0) -> None:
    """Write 48 conversations: `even` have one length, `uneven` up to 900 tokens, `pairs` also two answers.

    An answer is a third of its conversation.
    """
    rng = random.Random(seed)
    vocabulary = ["alpha", "beta", "gamma", "delta", "order", "parcel", "invoice", "desk", "lamp", "blue", "Monday", "seven"]
    with path.open("w", encoding="utf-8") as file:
        for _ in range(48):
            count = 300 if kind == "even" else rng.randint(6, 300)
            text = [" ".join(rng.choice(vocabulary) for _ in range(length)) for length in (2 * count // 3, count // 3)]
            turns = [{"role": role, "content": content} for role, content in zip(("user", "assistant"), text, strict=True)]
            other = {"role": "assistant", "content": f"{text[1]} {vocabulary[0]}"}
            row = {"prompt": turns[:1], "chosen": turns[1:], "rejected": [other]} if kind == "pairs" else {"messages": turns}
            file.write(json.dumps(row) + "\n")
