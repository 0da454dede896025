"""`finetune serve`: runs of one base model as an endpoint with OpenAI's interface."""

from __future__ import annotations

import sys
from typing import Any

from rich.markup import escape

from finetune.cli.output import print_json
from finetune.cli.render import err, out, show_progress
from finetune.errors import CommandError
from finetune.evaluate.answerer import adapter_folder
from finetune.http_server import choose_token, host_in_url, serve_until_interrupted
from finetune.planner.plan import read_plan
from finetune.requirements import refuse_missing_extra
from finetune.run.card import restrict_visible_devices
from finetune.run.directory import RunDirectory, open_run
from finetune.system import port_socket


def serve_runs(
    sources: list[str], *, host: str, port: int, token: str | None, context: int | None, only_commands: bool, as_json: bool
) -> None:
    """Load the base model with each run's adapter and answer until Ctrl-C; with `only_commands` print those for others."""
    runs = [open_run(source) for source in sources]
    if not only_commands:  # before torch is imported, which takes seconds
        refuse_missing_extra("serve", "serving")
        key, bound = choose_token(token, "Leave it out for a random one."), _bound(host, port)
    restrict_visible_devices(runs[0])
    from finetune.serve.models import runs_by_name

    named_runs = runs_by_name(runs)
    if only_commands:
        _print_commands(named_runs, context, as_json=as_json)
        return
    with show_progress(quiet=as_json) as progress:
        progress("counting what fits")
        fits = _serving_memory(named_runs, context)
        progress(f"loading {fits.summary}")
        from finetune.serve.models import Models

        models = Models(named_runs)
    url = f"http://{host_in_url(host)}:{bound.getsockname()[1]}/v1"
    if as_json:
        print_json({"url": url, "token": key, "models": models.names, "tokens": fits.tokens, "weight_bytes": fits.weight_bytes,
                    "kv_cache_bytes_per_token": fits.token_bytes})  # fmt: skip
    else:
        out.print(f"[bold]{url}[/]  models: {escape(', '.join(models.names))}  ({fits.summary})", soft_wrap=True)
        out.print(f"token: {escape(key)}", soft_wrap=True)
        _print_commands(named_runs, context, as_json=False)
        err.print("[dim]One answer at a time. Ctrl-C ends the server.[/]")
    _listen(models, fits.tokens, key, bound)


def _listen(models: Any, tokens: int, key: str, bound: Any) -> None:
    from finetune.serve.api import build
    from finetune.serve.engine import Engine

    sys.stdout.flush()
    engine = Engine(models, tokens)
    try:
        serve_until_interrupted(build(engine, key), bound)
    finally:
        engine.close()


def _serving_memory(runs: dict[str, RunDirectory], context: int | None) -> Any:
    from finetune.model.library_warnings import quiet_libraries
    from finetune.model.transformers_config import load_config
    from finetune.model.weights import ADAPTER_WEIGHTS
    from finetune.serve.memory_check import serving_memory

    quiet_libraries()
    plan = read_plan(next(iter(runs.values())).plan)
    folders = [folder for run in runs.values() if (folder := adapter_folder(run))]
    adapters = sum((folder / ADAPTER_WEIGHTS).stat().st_size for folder in folders)
    config = load_config(plan.settings)
    return serving_memory(plan.settings, config, on_cpu=plan.card.is_cpu, adapter_bytes=adapters, context=context)


def _print_commands(runs: dict[str, RunDirectory], context: int | None, *, as_json: bool) -> None:
    """Commands for other servers; a comment with the reason where one of them can't serve the runs."""
    from finetune.serve.external_servers import gguf_file, llama_command, vllm_command

    commands = {}
    for name, command in (("vllm", lambda: vllm_command(runs, context)), ("llama.cpp", lambda: llama_command(runs))):
        try:
            commands[name] = command()
        except CommandError as error:
            commands[name] = f"# {error.problems[0]}. {error.fix}"
    if as_json:
        print_json(commands)
        return
    for name, line in commands.items():
        out.print(f"[dim]{name}:[/] {escape(line)}", soft_wrap=True)
    name, run = next(iter(runs.items()))
    if not gguf_file(name, run).is_file():
        out.print(f"[dim]llama.cpp's file is written by:[/] finetune export {escape(name)} --llama-cpp DIR", soft_wrap=True)


def _bound(host: str, port: int) -> Any:
    """A bound socket, before a model is loaded. Raises CommandError when it is taken."""
    import socket

    bound = port_socket(socket.AF_INET6 if ":" in host else socket.AF_INET)
    try:
        bound.bind((host, port))
        bound.listen(128)  # clients that connect while the model loads wait
    except OSError as error:
        bound.close()
        reason = error.strerror or error
        raise CommandError(f"can't listen on {host}, port {port}: {reason}", "Another port: finetune serve --port 0") from None
    return bound
