"""The same models in external servers: the commands for vLLM and llama.cpp."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from finetune.errors import CommandError
from finetune.evaluate.answerer import adapter_folder
from finetune.files import read_json
from finetune.model.configuration import ADAPTER_CONFIG, resolve_model_path
from finetune.planner.plan import read_plan
from finetune.run.directory import RunDirectory
from finetune.system import shell_join

#: The values that vLLM accepts: MaxLoRARanks in https://github.com/vllm-project/vllm/blob/main/vllm/config/lora.py
VLLM_RANKS = (1, 8, 16, 32, 64, 128, 256, 320, 512)


def vllm_command(runs: dict[str, RunDirectory], tokens: int | None = None) -> str:
    """The command for vLLM. Raises CommandError for adapters that it can't load."""
    settings = read_plan(next(iter(runs.values())).plan).settings
    folders = {name: adapter_folder(run) for name, run in runs.items()}
    configs = {name: _adapter_config(folder) for name, folder in folders.items()}
    if unsupported := next((name for name, config in configs.items() if config.get("use_dora")), None):
        raise CommandError(f"vLLM has no DoRA, which {unsupported} has", f"Merge it: finetune merge {runs[unsupported].path}")
    if grown := next((name for name, config in configs.items() if config.get("trainable_token_indices")), None):
        raise CommandError(
            f"vLLM reads no new tokens from an adapter, which {grown} has", f"Merge it: finetune merge {runs[grown].path}"
        )
    rank = max(_rank(config) for config in configs.values())
    allowed = next((max_rank for max_rank in VLLM_RANKS if max_rank >= rank), None)
    if allowed is None:
        raise CommandError(f"vLLM has no adapters of rank {rank}; {VLLM_RANKS[-1]} is its largest", "Merge it: finetune merge")
    arguments = ["vllm", "serve", str(resolve_model_path(settings)), "--enable-lora", "--max-lora-rank", str(allowed)]
    if len(runs) > 1:
        arguments += ["--max-loras", str(len(runs))]
    if tokens:
        arguments += ["--max-model-len", str(tokens)]
    template = next(
        (path for folder in folders.values() if folder and (path := folder / "chat_template.jinja").is_file()), None
    )
    if template:
        arguments += ["--chat-template", str(template.resolve())]
    modules = [f"{name}={folder.resolve()}" for name, folder in folders.items() if folder]
    return shell_join([*arguments, "--lora-modules", *modules])


def llama_command(runs: dict[str, RunDirectory]) -> str:
    """The command for llama.cpp's server, after the export."""
    name, run = next(iter(runs.items()))
    return shell_join(["llama-server", "--model", str(gguf_file(name, run)), "--alias", name, "--jinja"])


def gguf_file(name: str, run: RunDirectory) -> Path:
    """The file that `finetune export` writes for a run."""
    return (run.path / "gguf-f16" / f"{name}-f16.gguf").resolve()


def _adapter_config(folder: Any) -> dict[str, Any]:
    try:
        return read_json(folder / ADAPTER_CONFIG, dict)
    except (OSError, ValueError) as error:
        raise CommandError(f"{folder / ADAPTER_CONFIG} can't be read: {error}", "Train again, or merge another run.") from None


def _rank(config: dict[str, Any]) -> int:
    """The largest rank of its layers."""
    return max([int(config["r"]), *map(int, (config.get("rank_pattern") or {}).values())])
