"""`finetune serve`."""

from __future__ import annotations

import os
import secrets
import shutil
import sys

from rich.markup import escape

from finetune.cli.output import print_json
from finetune.cli.render import out
from finetune.evaluate.answerer import adapter_folder
from finetune.evaluate.results import answers_without_thoughts
from finetune.files import read_json
from finetune.model.configuration import ADAPTER_CONFIG, read_config, resolve_model_path
from finetune.planner.plan import read_plan
from finetune.planner.shape import shape_of
from finetune.run.card import restrict_visible_devices
from finetune.run.directory import RunDirectory, open_run
from finetune.settings.base_formats import BITS_16
from finetune.system import shell_join
from finetune.units import format_bytes

#: Environment variables of the keys: every user can read arguments such as --api-key in the list of processes.
_KEY_VARIABLES = {"vllm": "VLLM_API_KEY", "llama-server": "LLAMA_API_KEY"}
_VLLM_RANKS = (1, 8, 16, 32, 64, 128, 256, 320, 512)  # MaxLoRARanks in its vllm/config/lora.py


def serve_run(source: str, port: int, *, only_commands: bool, as_json: bool) -> None:
    """Print the commands, and replace this process by the first installed server."""
    run, key = open_run(source), secrets.token_urlsafe(32)
    commands, note = server_commands(run, port)
    # a key that the user has set is not replaced
    prefixes = {program: f"{name}={key} " for program, name in _KEY_VARIABLES.items() if not os.environ.get(name)}
    lines = [prefixes.get(command[0], "") + shell_join(command) for command in commands]
    if as_json:
        print_json({"commands": lines, "note": note})
        return
    out.print(escape("\n".join([*lines, note] if note else lines)), soft_wrap=True)
    # transformers serve can't be protected by a key, so it is not started
    startable = next((command for command in commands if command[0] in _KEY_VARIABLES and shutil.which(command[0])), None)
    if startable and not only_commands:
        restrict_visible_devices(run)
        sys.stdout.flush()
        variable = _KEY_VARIABLES[startable[0]]
        os.execvpe(startable[0], startable, {**os.environ, variable: os.environ.get(variable) or key})


def server_commands(run: RunDirectory, port: int) -> tuple[list[list[str]], str]:
    """Return the commands of suitable servers, and why vLLM is unsuitable."""
    plan, path = read_plan(run.plan), run.path.resolve()
    settings, card, adapter = plan.settings, plan.card, adapter_folder(run) or path
    base = resolve_model_path(settings)
    address = ["--host", "127.0.0.1", "--port", str(port)]
    template_file, no_thinking = adapter / "chat_template.jinja", '{"enable_thinking": false}'
    source = template_file.read_text(encoding="utf-8") if template_file.is_file() else ""
    without_thoughts = "enable_thinking" in source and answers_without_thoughts(run)
    commands, note = list[list[str]](), ""
    gguf = max(path.glob("gguf-[!a]*/*.gguf"), key=lambda file: file.stat().st_mtime, default=None)  # no gguf-adapter-*
    if gguf:
        options = ["--chat-template-kwargs", no_thinking] if without_thoughts else []
        commands.append(["llama-server", "--model", str(gguf), "--alias", path.name, "--jinja", *options, *address])
    config = read_json(adapter / ADAPTER_CONFIG, dict)
    largest_rank = max([int(config["r"]), *map(int, (config.get("rank_pattern") or {}).values())])
    rank = next((str(allowed) for allowed in _VLLM_RANKS if allowed >= largest_rank), None)
    # vLLM loads the base in 16 bit, even if the run quantised it
    weight_bytes = shape_of(read_config(settings), settings).weight_bytes(BITS_16) if settings.base_format.setting else 0
    if rank is None or config.get("use_dora") or config.get("trainable_token_indices"):
        note = f"vLLM can't read this adapter (DoRA, new tokens or a rank over 512). Merge it: finetune merge {run.path}"
    elif weight_bytes > card.total_bytes:
        note = f"vLLM loads 16-bit weights: {format_bytes(weight_bytes)}, {card.name} has {format_bytes(card.total_bytes)}. "
        note += f"Use {gguf}" if gguf else f"Make a GGUF: finetune export {run.path} --type q4_k_m"
    else:
        revision = ["--revision", settings.model_revision] if settings.model_revision else []
        template = ["--chat-template", str(template_file.resolve())] if source else []
        template += ["--default-chat-template-kwargs", no_thinking] if without_thoughts else []
        lora = ["--enable-lora", "--max-lora-rank", rank, "--lora-modules", f"{path.name}={adapter.resolve()}"]
        commands.append(["vllm", "serve", base, *address, *revision, *template, *lora])
    if (path / "merged" / "config.json").is_file():
        commands.append(["transformers", "serve", str(path / "merged"), *address])
    return commands, note
