"""`finetune serve`: start an installed server with a run's result, or print the command of each that can serve it."""

from __future__ import annotations

import os
import shutil
import sys
from pathlib import Path

from rich.markup import escape

from finetune.cli.output import print_json
from finetune.cli.render import out
from finetune.evaluate.answerer import adapter_folder
from finetune.files import read_json
from finetune.model.configuration import ADAPTER_CONFIG, resolve_model_path
from finetune.planner.plan import read_plan
from finetune.run.directory import RunDirectory, open_run
from finetune.system import shell_join

#: The values that vLLM accepts: MaxLoRARanks in https://github.com/vllm-project/vllm/blob/main/vllm/config/lora.py
VLLM_RANKS = (1, 8, 16, 32, 64, 128, 256, 320, 512)


def serve_run(source: str, port: int, *, only_commands: bool, as_json: bool) -> None:
    """Replace this process by the first installed server that can serve the run; print the commands if there is none."""
    commands = server_commands(open_run(source), port)
    if as_json:
        print_json({name: shell_join(command) for name, command in commands.items()})
        return
    for name, command in commands.items():
        out.print(f"[dim]{name}:[/] {escape(shell_join(command))}", soft_wrap=True)
    installed = next((command for command in commands.values() if shutil.which(command[0])), None)
    if only_commands or installed is None:
        return
    sys.stdout.flush()
    os.execvp(installed[0], installed)


def server_commands(run: RunDirectory, port: int) -> dict[str, list[str]]:
    """The command of each server that can serve the run. Only vLLM reads an adapter; the others need a merged model or GGUF."""
    name, merged = run.path.resolve().name, run.path / "merged"
    commands = {}
    if gguf := next(iter(sorted(run.path.glob("gguf-*/*.gguf"))), None):
        commands["llama.cpp"] = ["llama-server", "--model", str(gguf), "--alias", name, "--jinja", "--port", str(port)]
    if rank := _vllm_rank(run):
        base, folder = resolve_model_path(read_plan(run.plan).settings), adapter_folder(run)
        commands["vLLM"] = ["vllm", "serve", str(base), "--enable-lora", "--max-lora-rank", str(rank), "--port", str(port),
                            "--lora-modules", f"{name}={folder}"]  # fmt: skip
    if (merged / "config.json").is_file():
        commands["transformers"] = ["transformers", "serve", str(merged), "--port", str(port)]
    return commands or {"first": ["finetune", "merge", str(run.path)]}


def _vllm_rank(run: RunDirectory) -> int | None:
    """The --max-lora-rank that the adapter needs; None for an adapter that vLLM can't load."""
    folder = adapter_folder(run) or Path()
    config = read_json(folder / ADAPTER_CONFIG, dict)
    if config.get("use_dora") or config.get("trainable_token_indices"):
        return None
    rank = max([int(config["r"]), *map(int, (config.get("rank_pattern") or {}).values())])
    return next((allowed for allowed in VLLM_RANKS if allowed >= rank), None)
