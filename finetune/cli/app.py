"""The commands and their options. Each command imports what it needs, so that help and errors are instant."""

from __future__ import annotations

import json
import logging
import os
import sys
import warnings
from typing import Annotated, Any

import typer

from finetune.errors import FinetuneError, RecipeError
from finetune.garbage import collect_rarely, leave_all

cli = typer.Typer(
    name="finetune", no_args_is_help=True, add_completion=False, rich_markup_mode="rich", pretty_exceptions_enable=False,
    help="Fine-tune a language model with LoRA on the card you own: see what fits, start, watch every byte, lose nothing.",
    epilog="Start here:  finetune run tiny-cpu      Exit codes: 0 done, 1 internal, 2 recipe, 3 will not fit, 4 data, "
    "5 out of memory, 6 diverged, 7 disk, 130/143 stopped.",
    context_settings={"help_option_names": ["-h", "--help"]},
)  # fmt: skip

RecipeArgument = Annotated[str, typer.Argument(metavar="RECIPE", help="A recipe file, or the name of a shipped one.")]
Overrides = Annotated[list[str] | None, typer.Argument(metavar="[key=value]...", help="Settings that replace the recipe's.")]
RunArgument = Annotated[str, typer.Argument(metavar="RUN", help="A run directory, its name under runs/, or 'latest'.")]
Json = Annotated[bool, typer.Option("--json", help="Machine-readable output.")]


def process() -> int:
    """Entry point of `finetune`: a process that runs one command and ends."""
    collect_rarely()
    for stream in (sys.stdout, sys.stderr):
        if hasattr(stream, "reconfigure"):  # a terminal that has no such letter shows its number
            stream.reconfigure(errors="backslashreplace")
    try:
        return main()
    finally:
        leave_all()


def main() -> int:
    """Runs a command and turns a FinetuneError into a message and its exit code."""
    warnings.filterwarnings("ignore", category=FutureWarning)  # between the libraries, nothing a user can act on
    logging.getLogger("bitsandbytes").setLevel(logging.ERROR)  # that another kernel could be downloaded
    try:
        return int(cli(standalone_mode=False) or 0)  # what a command ended with; of typer.Exit only the code comes out here
    except FinetuneError as error:
        return report(error)
    except typer.Exit as ended:
        return int(ended.exit_code)
    except typer.Abort:
        return 130
    except KeyboardInterrupt:
        return 130
    except BrokenPipeError:  # the reader of a pipe left, as `head` does
        return _unread()
    except SystemExit as ended:
        if isinstance(ended.__context__, BrokenPipeError):  # typer makes an exit of it
            return _unread()
        raise
    except Exception as error:  # noqa: BLE001 - click's own usage errors, and what nobody foresaw
        return _unforeseen(error)


def report(error: FinetuneError) -> int:
    """Say what is wrong and what to type. Returns the exit code."""
    if "--json" in sys.argv:
        print(json.dumps(error.as_json()))
        return error.exit_code
    from finetune.cli.render import print_error

    print_error(error)
    return error.exit_code


def _unread() -> int:
    os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
    return 0


def _unforeseen(error: Exception) -> int:
    if hasattr(error, "format_message") and hasattr(error, "show"):  # typer carries its own copy of click's exceptions
        if "--json" in sys.argv:
            return report(RecipeError(error.format_message()))
        error.show()
        return 2
    if os.environ.get("FINETUNE_TRACEBACK"):
        raise error
    if "--json" in sys.argv:
        return report(FinetuneError(f"Internal error: {type(error).__name__}: {error}"))
    print(
        f"Internal error: {type(error).__name__}: {error}\nRun it again with FINETUNE_TRACEBACK=1 to see where.",
        file=sys.stderr,
    )
    return 1


@cli.callback(invoke_without_command=True)
def _options(version: Annotated[bool, typer.Option("--version", help="Versions of finetune and the stack.")] = False) -> None:
    if version:
        from finetune.cli.render import print_versions

        print_versions()
        raise typer.Exit


@cli.command()
def run(
    recipe: RecipeArgument, overrides: Overrides = None, json: Json = False,
    force: Annotated[bool, typer.Option("--force", help="Start although the forecast says it does not fit.")] = False,
    detach: Annotated[bool, typer.Option("--detach", help="Start, and don't wait.")] = False,
) -> None:  # fmt: skip
    """Fine-tune: plan, check, train, watch. Ctrl-C stops after the step, with a checkpoint.

    Examples:  finetune run tiny-cpu      finetune run recipes/7b-4090.yaml lora_r=32 output_dir=runs/try2
    """
    from finetune.cli.run import run_recipe

    raise typer.Exit(run_recipe(recipe, overrides or [], as_json=json, force=force, detach=detach))


@cli.command()
def resume(run: RunArgument = "latest", json: Json = False) -> None:
    """Go on with a run from its newest checkpoint that verifies.

    Example:  finetune resume runs/tiny-1a2b3c4d
    """
    from finetune.cli.run import resume_run

    raise typer.Exit(resume_run(run, as_json=json))


@cli.command()
def watch(run: RunArgument = "latest", json: Json = False) -> None:
    """Follow a run that is at work, or show how it ended.

    Example:  finetune watch latest
    """
    from finetune.cli.run import watch_run

    raise typer.Exit(watch_run(run, as_json=json))


@cli.command()
def stop(
    run: RunArgument = "latest",
    json: Json = False,
    now: Annotated[bool, typer.Option("--now", help="Don't save first.")] = False,
    every: Annotated[bool, typer.Option("--all", help="Every run that is at work.")] = False,
) -> None:
    """Stop a run after its step, with a checkpoint.

    Example:  finetune stop latest
    """
    from finetune.cli.run import stop_all, stop_run

    if every:
        raise typer.Exit(stop_all(as_json=json))
    raise typer.Exit(stop_run(run, now=now, as_json=json))


@cli.command()
def runs(json: Json = False) -> None:
    """List the runs with their states.

    Example:  finetune runs --json
    """
    from finetune.cli.runs import show_runs

    show_runs(as_json=json)


@cli.command()
def plan(
    recipe: RecipeArgument, overrides: Overrides = None, json: Json = False,
    gpu: Annotated[str | None, typer.Option(help="A card of the catalogue, e.g. rtx-4090, in place of this machine's.")] = None,
    free: Annotated[str | None, typer.Option(help="Memory that is free on it, e.g. 22.1GiB.")] = None,
) -> None:  # fmt: skip
    """Show where every byte will go and which plan is the fastest that fits, before anything is loaded. Exit 0 fits, 3 doesn't.

    Example:  finetune plan 7b-4090 --gpu rtx-4090 max_length=4096
    """
    from finetune.cli.plan import show_plan

    raise typer.Exit(show_plan(recipe, overrides or [], gpu=gpu, free=free, as_json=json))


@cli.command()
def data(recipe: RecipeArgument, overrides: Overrides = None, json: Json = False) -> None:
    """Show what will be trained on: rows used and refused, lengths, and one example with its trained tokens marked.

    Example:  finetune data tiny-cpu
    """
    from finetune.cli.data import show_data

    show_data(recipe, overrides or [], as_json=json)


@cli.command(name="eval")
def evaluate(
    run: RunArgument = "latest",
    json: Json = False,
    rows: Annotated[int | None, typer.Option(min=1, help="Score only so many rows.")] = None,
) -> None:
    """Score held-out rows by exact match and loss, base against tuned.

    Example:  finetune eval latest
    """
    from finetune.cli.evaluate import show_scores

    show_scores(run, rows=rows, as_json=json)


@cli.command()
def chat(
    run: RunArgument = "latest", json: Json = False,
    base: Annotated[bool, typer.Option("--base", help="Talk to the untouched base model.")] = False,
    prompt: Annotated[str | None, typer.Option(help="One question, one answer.")] = None,
    system: Annotated[str | None, typer.Option(help="System message.")] = None,
    max_new_tokens: Annotated[int, typer.Option(min=1, help="Longest answer, in tokens.")] = 512,
) -> None:  # fmt: skip
    """Talk to the result.

    Example:  finetune chat latest --prompt "Route this message. My parcel is late."
    """
    from finetune.cli.evaluate import chat_with

    chat_with(run, base=base, prompt=prompt, system=system, max_new_tokens=max_new_tokens, as_json=json)


@cli.command()
def snapshot(run: RunArgument = "latest", json: Json = False) -> None:
    """Show where a run's memory went: peaks by phase, forecast against measured, and the allocator's history.

    Example:  finetune snapshot latest
    """
    from finetune.cli.snapshot import show_snapshot

    show_snapshot(run, as_json=json)


@cli.command()
def merge(
    run: RunArgument = "latest", json: Json = False,
    output: Annotated[str | None, typer.Option(help="Folder for the merged model; RUN/merged by default.")] = None,
) -> None:  # fmt: skip
    """Merge the adapter into the base model's 16-bit weights, for programs that load one model.

    Example:  finetune merge latest --output models/support
    """
    from finetune.cli.merge import merge_run

    merge_run(run, output=output, as_json=json)


@cli.command()
def recipes(
    verb: Annotated[str, typer.Argument(help="list, show NAME, copy NAME, or keys.")] = "list",
    name: Annotated[str | None, typer.Argument(help="Name of a shipped recipe.")] = None,
    json: Json = False,
) -> None:
    """List, show or copy the shipped recipes; `keys` lists every setting.

    Example:  finetune recipes copy 7b-4090
    """
    from finetune.cli.recipes import show_recipes

    show_recipes(verb, name, as_json=json)


@cli.command()
def ui(
    host: Annotated[str, typer.Option(help="Address to listen on; the token is asked for in any case.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(help="Port, or the next free one; 0 takes any.")] = 7860,
    runs: Annotated[str, typer.Option(help="Folder of the runs.")] = "runs",
    allow_host: Annotated[list[str] | None, typer.Option(help="Another name under which browsers reach this server.")] = None,
) -> None:
    """Open the web page: prints a link with a token; Ctrl-C ends the page, runs go on.

    Example:  finetune ui
    """
    from finetune.cli.ui import start_page

    raise typer.Exit(start_page(host=host, port=port, runs=runs, allow_host=allow_host or []))


@cli.command()
def doctor(
    recipe: Annotated[str | None, typer.Argument(metavar="[RECIPE]", help="Check what this recipe needs, too.")] = None,
    overrides: Overrides = None,
    json: Json = False,
) -> None:
    """Check driver, torch, bitsandbytes, memory, disk, hub and port in ten seconds, each with its fix. Exit 1 when one fails.

    Example:  finetune doctor tiny-cpu
    """
    from finetune.cli.doctor import show_doctor

    raise typer.Exit(show_doctor(recipe, overrides or [], as_json=json))


@cli.command(name="export-launch")
def export_launch(
    engine: Annotated[str, typer.Argument(help="slurm, kubernetes or skypilot.")], recipe: RecipeArgument,
    overrides: Overrides = None, json: Json = False,
    output: Annotated[str | None, typer.Option("--output", "-o", help="File to write; without it, standard output.")] = None,
    image: Annotated[str, typer.Option(help="Container image (kubernetes, skypilot).")] = "finetune:latest",
    hours: Annotated[int, typer.Option(min=1, help="Longest time of the job.")] = 24,
    volume: Annotated[str, typer.Option(help="Volume claim that holds data and runs (kubernetes).")] = "finetune-data",
) -> None:  # fmt: skip
    """Write the recipe as a job file of an engine that has many cards or machines.

    Example:  finetune export-launch slurm 7b-4090 launch.num_processes=8 launch.num_machines=2 -o job.sbatch
    """
    from finetune.cli.jobs import export_launch as export

    export(engine, recipe, overrides or [], output=output, image=image, hours=hours, volume=volume, as_json=json)


def print_json(values: Any) -> None:
    """One JSON document on standard output."""
    print(json.dumps(values, ensure_ascii=False, default=str))
