"""Commands and options. Each command imports what it needs, so that help and errors are instant."""

from __future__ import annotations

from typing import Annotated

import typer

from finetune.errors import CommandError, exit_code_causes

cli = typer.Typer(
    name="finetune", no_args_is_help=True, add_completion=True, rich_markup_mode="rich", pretty_exceptions_enable=False,
    help="Fine-tune language models with LoRA on your own card: forecast what fits, train, resume, chat, export.",
    epilog="Start here:  finetune run tiny-cpu\n\nExit codes: 0 done, 1 internal error, "
    f"{', '.join(f'{code} {cause}' for code, cause in exit_code_causes().items())}, 130 or 143 stopped",
    context_settings={"help_option_names": ["-h", "--help"]},
)  # fmt: skip

RecipeArgument = Annotated[str, typer.Argument(metavar="RECIPE", help="Recipe file, or name of a shipped recipe.")]
ModelOrRecipe = Annotated[
    str | None, typer.Argument(metavar="RECIPE", help="Recipe file, name of a shipped recipe, or a model's name.")
]
Model = Annotated[str | None, typer.Option("--model", help="Train this model: hub id, name or folder.")]
Data = Annotated[str | None, typer.Option("--data", help="Train on this file or hub dataset.")]
Overrides = Annotated[
    list[str] | None, typer.Argument(metavar="key=value", help="Settings that override the recipe's; the last one counts.")
]
RunArgument = Annotated[str, typer.Argument(metavar="RUN", help="Run directory, its name, or 'latest'.")]
Json = Annotated[bool, typer.Option("--json", help="Print JSON.")]


@cli.callback(invoke_without_command=True)
def _options(
    version: Annotated[bool, typer.Option("--version", help="Print the versions of finetune and its packages.")] = False,
) -> None:
    if version:
        from finetune.cli.render import print_versions

        print_versions()
        raise typer.Exit


@cli.command()
def run(
    process: typer.Context, recipe: ModelOrRecipe = None, overrides: Overrides = None, model: Model = None, data: Data = None,
    json: Json = False,
    force: Annotated[bool, typer.Option("--force", help="Start even if the forecast says it does not fit.")] = False,
    detach: Annotated[bool, typer.Option("--detach", help="Start in the background and return.")] = False,
    measure: Annotated[
        bool, typer.Option("--measure", help="First measure what int8 and NF4 cost on the held-out rows.")
    ] = False,
) -> None:  # fmt: skip
    """Plan, check, train and watch a run.

    Says how long it takes: by earlier runs here, after ten steps by its own. Ctrl-C stops after the step, with a checkpoint.

    Example:  finetune run tiny-cpu

    Example:  finetune run 7b-4090 lora_r=32 output_dir=runs/try2

    Example:  finetune run --model Qwen/Qwen3-4B --data mine.jsonl
    """
    from finetune.cli.run import run_recipe

    raise typer.Exit(run_recipe(
        recipe, overrides or [], model=model, data=data, as_json=json, force=force, detach=detach, measure=measure,
        alone=bool(process.obj),
    ))  # fmt: skip


cli.command("train", hidden=True, help="The same as run.")(run)  # what other tools call it


@cli.command()
def resume(run: RunArgument = "latest", overrides: Overrides = None, json: Json = False) -> None:
    """Resume a run from its newest verified checkpoint.

    Settings without a part in what is learnt may change.

    Example:  finetune resume runs/tiny-1a2b3c4d

    Example:  finetune resume latest save_steps=50 eval_steps=100
    """
    from finetune.cli.run import resume_run

    raise typer.Exit(resume_run(run, overrides or [], as_json=json))


@cli.command()
def watch(run: RunArgument = "latest", json: Json = False) -> None:
    """Follow a running run, or show how it ended.

    Example:  finetune watch latest
    """
    from finetune.cli.run import watch_run

    raise typer.Exit(watch_run(run, as_json=json))


@cli.command()
def stop(
    run: RunArgument = "latest",
    json: Json = False,
    now: Annotated[bool, typer.Option("--now", help="Stop at once, without a checkpoint.")] = False,
    every: Annotated[bool, typer.Option("--all", help="Stop all running runs.")] = False,
) -> None:
    """Stop a run after the current step, with a checkpoint.

    Example:  finetune stop latest
    """
    from finetune.cli.run import stop_all, stop_run

    if every:
        raise typer.Exit(stop_all(as_json=json))
    raise typer.Exit(stop_run(run, now=now, as_json=json))


@cli.command()
def pause(run: RunArgument = "latest", json: Json = False) -> None:
    """Free the card after the current step; `resume` continues bit-exactly.

    Example:  finetune pause latest
    """
    from finetune.cli.run import pause_run

    raise typer.Exit(pause_run(run, as_json=json))


@cli.command()
def finish(run: RunArgument = "latest", json: Json = False) -> None:
    """End a run after the current step, as finished: its best step is the result.

    Example:  finetune finish latest
    """
    from finetune.cli.run import finish_run

    raise typer.Exit(finish_run(run, as_json=json))


@cli.command()
def runs(
    verb: Annotated[str, typer.Argument(metavar="VERB", help="list, show RUN, rm RUN ..., or rename RUN NAME.")] = "list",
    names: Annotated[list[str] | None, typer.Argument(metavar="RUN", help="Run directories, names or 'latest'.")] = None,
    json: Json = False,
) -> None:
    """List, show, delete or rename runs.

    Deleted runs are moved to .trash in their folder.

    Example:  finetune runs rename latest support-2
    """
    from finetune.cli.runs import change_runs

    change_runs(verb, names or [], as_json=json)


@cli.command("status", hidden=True)  # what other tools call it
@cli.command("info", hidden=True)
@cli.command()
def show(run: RunArgument = "latest", json: Json = False) -> None:
    """Show a run: how far it is, its losses and scores, and its recipe.

    Example:  finetune show latest
    """
    from finetune.cli.runs import show_run

    show_run(run, as_json=json)


@cli.command()
def plan(
    process: typer.Context, recipe: ModelOrRecipe = None, overrides: Overrides = None, model: Model = None, data: Data = None,
    json: Json = False,
    gpu: Annotated[str | None, typer.Option(help="Card to plan for: index in nvidia-smi, or a name, e.g. rtx-4090.")] = None,
    free: Annotated[str | None, typer.Option(help="Free memory to assume on the card, e.g. 22.1GiB.")] = None,
    largest: Annotated[
        str | None, typer.Option(help="Find the largest max_length, lora_r, per_device_train_batch_size or model that fits.")
    ] = None,
    images: Annotated[
        str | None, typer.Option(help="Without data: the pictures of each row, e.g. 1024x1024, or 1024x1024x3 for three.")
    ] = None,
    measure: Annotated[
        bool, typer.Option("--measure", help="Measure the base's held-out loss in 16 bit, int8 and NF4.")
    ] = False,
) -> None:  # fmt: skip
    """Forecast memory and find the fastest settings that fit.

    Says how long the run takes where earlier ones were measured. Loads no weights, but with --measure.

    Exit codes: 0 can be run, 3 does not fit or the card can't be used, 4 data.

    Example:  finetune plan 7b-4090 --gpu rtx-4090 max_length=4096

    Example:  finetune plan Qwen/Qwen2.5-7B-Instruct --gpu 4090

    Example:  finetune plan 8b-3090 --largest max_length

    Example:  finetune plan Qwen/Qwen3-VL-8B-Instruct --gpu 4090 --images 1024x1024

    Example:  finetune plan tiny-cpu --measure
    """
    from finetune.cli.plan import show_plan

    raise typer.Exit(show_plan(
        recipe, overrides or [], model=model, data=data, gpu=gpu, free=free, largest=largest, images=images, measure=measure,
        as_json=json, alone=bool(process.obj),
    ))  # fmt: skip


@cli.command()
def sweep(
    process: typer.Context,
    recipe: Annotated[
        str | None,
        typer.Argument(metavar="RECIPE", help="Recipe file, name of a shipped recipe, a model's name, or a sweep's folder."),
    ] = None,
    overrides: Annotated[
        list[str] | None, typer.Argument(metavar="key=value,...", help="Values to try; with one value, of every arm.")
    ] = None,
    model: Model = None, data: Data = None, json: Json = False,
    budget: Annotated[str | None, typer.Option(help="Try only as many arms as fit in this time, e.g. 3h.")] = None,
    detach: Annotated[bool, typer.Option("--detach", help="Start in the background and return.")] = False,
    stop: Annotated[bool, typer.Option("--stop", help="Stop a sweep after its arm's step, with a checkpoint.")] = False,
    show: Annotated[bool, typer.Option("--show", help="Show a sweep without going on with it.")] = False,
) -> None:  # fmt: skip
    """Compare runs of a recipe that differ in a few settings.

    Without values it tries five learning rates around the advice. Arms that fall behind are stopped early. Ctrl-C stops it;
    with its folder it goes on. Needs the extra `sweep`.

    Example:  finetune sweep tiny-cpu

    Example:  finetune sweep 7b-4090 learning_rate=1e-4,2e-4,4e-4 lora_r=16,64 --budget 3h

    Example:  finetune sweep runs/tiny-1a2b3c4d-sweep
    """
    from finetune.cli.sweep import sweep_command

    raise typer.Exit(sweep_command(
        recipe, overrides or [], model=model, data=data, budget=budget, detach=detach, stop=stop, show=show, as_json=json,
        alone=bool(process.obj),
    ))  # fmt: skip


@cli.command()
def data(
    process: typer.Context, recipe: ModelOrRecipe = None, overrides: Overrides = None, model: Model = None, data: Data = None,
    json: Json = False,
) -> None:  # fmt: skip
    """Show what is trained on: rows, lengths, a marked example.

    Exit codes: 0, or 4 when a run would refuse the rows.

    Example:  finetune data tiny-cpu --data rows.jsonl
    """
    from finetune.cli.data import show_data

    raise typer.Exit(show_data(recipe, overrides or [], model=model, data=data, as_json=json, alone=bool(process.obj)))


@cli.command()
def cache(verb: Annotated[str, typer.Argument(metavar="VERB", help="list, or clear.")] = "list", json: Json = False) -> None:
    """Show or clear tokenised rows and quantised models on disk.

    They are made again when they are needed.

    Example:  finetune cache clear
    """
    from finetune.cli.cache import use_cache

    use_cache(verb, as_json=json)


@cli.command(name="eval")
def evaluate(
    run: RunArgument = "latest",
    json: Json = False,
    rows: Annotated[int | None, typer.Option(min=1, help="Score only this many rows.")] = None,
    last: Annotated[bool, typer.Option("--last", help="Score the last step's adapter, when the best is another.")] = False,
    data: Annotated[str | None, typer.Option("--data", help="Score the rows of this file, not the held-out ones.")] = None,
    forgetting: Annotated[
        bool, typer.Option("--forgetting", help="Score the held-out rows of the run whose adapter this one continued.")
    ] = False,
    probe: Annotated[bool, typer.Option(help="Also measure forgetting: loss on general questions and on earlier rows.")] = True,
    score: Annotated[
        str | None, typer.Option(help="exact, contains, regex, json, numeric, calls, loss, or FILE.py:FUNCTION.")
    ] = None,
    pattern: Annotated[str | None, typer.Option(help="regex: what it finds in answer and expected answer is compared.")] = None,
    tolerance: Annotated[float, typer.Option(help="numeric: allowed relative difference, e.g. 0.01.")] = 0.0,
    show: Annotated[str, typer.Option(help="Rows to show: differ, worst or best.")] = "differ",
    examples: Annotated[int, typer.Option(min=0, help="How many rows to show.")] = 2,
    quantisation: Annotated[
        bool, typer.Option("--quantisation", help="Only: loss of base and tuned model in 16 bit, int8 and NF4.")
    ] = False,
    tasks: Annotated[
        str | None, typer.Option(metavar="NAMES", help="Only: tasks of lm-evaluation-harness: gsm8k,ifeval or YAML files.")
    ] = None,
) -> None:
    """Score base and tuned model on the held-out rows, or on those of a file.

    The difference has a 95 % interval of a paired bootstrap. An evaluation that was killed continues with the remaining rows.

    Example:  finetune eval latest

    Example:  finetune eval latest --score json --data mine.jsonl

    Example:  finetune eval latest --quantisation

    Example:  finetune eval latest --tasks gsm8k,ifeval --rows 100
    """
    if tasks is not None:
        from finetune.cli.evaluate import show_tasks

        others = {
            "--data": data, "--score": score, "--pattern": pattern, "--tolerance": tolerance,
            "--forgetting": forgetting, "--quantisation": quantisation,
        }  # fmt: skip
        show_tasks(run, tasks, rows=rows, last=last, others=[name for name, value in others.items() if value], as_json=json)
        return
    if quantisation:
        from finetune.cli.evaluate import show_quantisation

        show_quantisation(run, last=last, as_json=json)
        return
    from finetune.cli.evaluate import show_scores
    from finetune.evaluate.scorers import scorer

    chosen = scorer(score or "exact", pattern=pattern, tolerance=tolerance) if score or pattern or tolerance else None
    show_scores(
        run, rows=rows, last=last, data=data, forgetting=forgetting, probe=probe, score=chosen, show=show, examples=examples,
        as_json=json,
    )  # fmt: skip


@cli.command()
def chat(
    runs: Annotated[
        list[str] | None, typer.Argument(metavar="RUN", help="Run directories, names or 'latest', of one base model.")
    ] = None,
    json: Json = False,
    base: Annotated[bool, typer.Option("--base", help="Chat with the base model, without the adapter.")] = False,
    both: Annotated[bool, typer.Option("--both", help="Base and tuned model answer, from the same seed.")] = False,
    prompt: Annotated[str | None, typer.Option(help="Answer one prompt and exit.")] = None,
    system: Annotated[str | None, typer.Option(help="System prompt.")] = None,
    max_new_tokens: Annotated[int, typer.Option(min=1, help="Longest answer, in tokens.")] = 512,
    temperature: Annotated[float, typer.Option(min=0, max=5, help="0 takes the likeliest token, 1 samples.")] = 0.0,
    top_p: Annotated[float, typer.Option(min=0.01, max=1, help="Sample from the likeliest tokens of this share.")] = 1.0,
    seed: Annotated[int, typer.Option(min=0, max=2**63 - 1, help="Seed of the sampling.")] = 0,
    tools: Annotated[
        str | None, typer.Option(metavar="FILE", help="JSON list of tools that the model may call; you type their answers.")
    ] = None,
) -> None:  # fmt: skip
    """Chat with the tuned model, the base model, or both.

    Answers are streamed. Ctrl-C stops an answer, a second one ends the chat. `/use RUN` changes who answers.

    Example:  finetune chat latest --prompt "My parcel is late."

    Example:  finetune chat latest --both --temperature 0.7 --system "You route messages."
    """
    from finetune.cli.chat import chat_with

    models = ("base", "tuned") if both else ("base",) if base else ("tuned",)
    run, *others = runs or ["latest"]
    chat_with(
        run, others=others, models=models, prompt=prompt, system=system, max_new_tokens=max_new_tokens,
        temperature=temperature, top_p=top_p, seed=seed, as_json=json, tools_file=tools,
    )  # fmt: skip


@cli.command()
def serve(
    run: RunArgument = "latest", json: Json = False,
    port: Annotated[int, typer.Option(min=1, max=65535, help="Port of the server.")] = 8000,
    commands: Annotated[bool, typer.Option("--commands", help="Only print the commands.")] = False,
) -> None:  # fmt: skip
    """Serve a run with vLLM, llama.cpp or transformers, whichever is installed; else print their commands.

    Example:  finetune serve latest
    """
    from finetune.cli.serve import serve_run

    serve_run(run, port, only_commands=commands, as_json=json)


@cli.command()
def snapshot(run: RunArgument = "latest", json: Json = False) -> None:
    """Show a run's memory: peaks by phase, forecast vs measured.

    Also names the allocator's histories of record_memory_history=true. A living run writes one after its step.

    Example:  finetune snapshot latest
    """
    from finetune.cli.snapshot import show_snapshot

    show_snapshot(run, as_json=json)


@cli.command()
def merge(
    run: RunArgument = "latest", json: Json = False,
    output: Annotated[str | None, typer.Option("--output", "-o", help="Folder to write; default RUN/merged.")] = None,
    max_shard_size: Annotated[str | None, typer.Option(help="Largest file, e.g. 5GB; default the base model's files.")] = None,
    check: Annotated[int, typer.Option(min=0, help="Answer this many held-out rows to show what merging changes.")] = 0,
) -> None:  # fmt: skip
    """Merge the adapter into the 16-bit base model.

    Tensor by tensor: the model need not fit into memory.

    Example:  finetune merge latest --output models/support
    """
    from finetune.cli.export import merge_run

    merge_run(run, output=output, max_shard_size=max_shard_size, check=check, as_json=json)


@cli.command()
def export(
    run: RunArgument = "latest", json: Json = False,
    to: Annotated[str, typer.Option(help="gguf, or gguf-adapter: base and adapter in two files.")] = "gguf",
    kind: Annotated[str, typer.Option("--type", help="f16, q8_0 or q4_k_m.")] = "f16",
    llama_cpp: Annotated[
        str, typer.Option("--llama-cpp", envvar="FINETUNE_LLAMA_CPP", help="Checkout of llama.cpp, for its converter.")
    ] = "llama.cpp",
    output: Annotated[str | None, typer.Option("--output", "-o", help="Folder to write; default RUN/gguf-TYPE.")] = None,
    rows: Annotated[int, typer.Option(min=1, help="Answer this many held-out rows with the file.")] = 120,
    data: Annotated[str | None, typer.Option("--data", help="Answer the rows of this file, not the held-out ones.")] = None,
) -> None:  # fmt: skip
    """Export to GGUF, tried in llama.cpp, with a Modelfile for Ollama.

    Refused when tokens, template or answers are not the adapter's; the message names the stage. Exit code 1.

    Example:  finetune export latest --type q8_0 --llama-cpp ~/llama.cpp
    """
    from finetune.cli.export import export_run

    export_run(run, to=to, kind=kind, llama_cpp=llama_cpp, output=output, rows=rows, data=data, as_json=json)


@cli.command(name="report")
def report_run(
    run: RunArgument = "latest", json: Json = False,
    output: Annotated[str | None, typer.Option("--output", "-o", help="File to write; default RUN/report.html.")] = None,
) -> None:  # fmt: skip
    """Write a run as one HTML file: plan, forecast, curves, scores.

    It opens offline and prints.

    Example:  finetune report latest
    """
    from finetune.cli.ui import write_report

    raise typer.Exit(write_report([run], output=output, as_json=json))


@cli.command()
def compare(
    runs: Annotated[list[str], typer.Argument(metavar="RUN", help="Run directories, names or 'latest'; two or more.")],
    json: Json = False,
    output: Annotated[str | None, typer.Option("--output", "-o", help="File to write; default comparison.html.")] = None,
) -> None:
    """Compare several runs in one HTML file.

    Curves, settings that differ, and paired scores on the rows that both were scored on.

    Example:  finetune compare first second
    """
    from finetune.cli.ui import write_report

    if len(set(runs)) < 2:
        raise CommandError("compare needs two runs or more", "For one run: finetune report RUN")
    raise typer.Exit(write_report(runs, output=output, as_json=json))


@cli.command()
def push(
    run: Annotated[str, typer.Argument(metavar="RUN", help="Run directory, its name, or 'latest'.")],
    repo: Annotated[str, typer.Argument(metavar="REPO", help="Repository of the hub, OWNER/NAME.")],
    json: Json = False,
    adapter: Annotated[bool, typer.Option("--adapter", help="Push the adapter; the default.")] = False,
    merged: Annotated[bool, typer.Option("--merged", help="Push the merged model, RUN/merged.")] = False,
    gguf: Annotated[list[str] | None, typer.Option("--gguf", metavar="FILE", help="Push GGUF files.")] = None,
    public: Annotated[bool, typer.Option("--public", help="A public repository; the default is private.")] = False,
    update: Annotated[bool, typer.Option("--update", help="The repository may have files already.")] = False,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="List files and sizes; send nothing.")] = False,
    yes: Annotated[bool, typer.Option("--yes", "-y", help="Do not ask.")] = False,
) -> None:
    """Push adapter, merged model or GGUF to the hub.

    One commit, with a model card; no row of the data, no path of this machine.

    Example:  finetune push latest alice/support-lora --dry-run
    """
    from finetune.cli.export import push_run

    if adapter and (merged or gguf):
        raise CommandError("--adapter, --merged and --gguf are three kinds of model", "Give one of them.")
    push_run(
        run, repo, merged=merged, gguf=gguf or [], public=public, update=update, dry_run=dry_run, yes=yes, as_json=json
    )  # fmt: skip


@cli.command()
def recipes(
    verb: Annotated[str, typer.Argument(metavar="VERB", help="list, show NAME, copy NAME, keys, or models.")] = "list",
    name: Annotated[str | None, typer.Argument(metavar="NAME", help="Name of a shipped recipe.")] = None,
    json: Json = False,
) -> None:
    """List, show or copy shipped recipes; `keys`: all settings; `models`: those planned without the hub.

    Example:  finetune recipes copy 7b-4090
    """
    from finetune.cli.recipes import show_recipes

    show_recipes(verb, name, as_json=json)


@cli.command()
def convert(
    recipe: Annotated[str, typer.Argument(metavar="FILE", help="Configuration of another tool.")],
    overrides: Overrides = None, model: Model = None, data: Data = None, json: Json = False,
    output: Annotated[str | None, typer.Option("--output", "-o", help="File to write; default standard output.")] = None,
) -> None:  # fmt: skip
    """Turn another tool's configuration into a recipe.

    LLaMA-Factory, Axolotl, TRL.

    Example:  finetune convert qwen3_lora_sft.yaml -o recipe.yaml
    """
    from finetune.cli.convert import convert_file

    convert_file(recipe, overrides or [], model=model, data=data, output=output, as_json=json)


@cli.command()
def ui(
    host: Annotated[str, typer.Option(help="Address to listen on; always needs the token.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(help="Port, or the next free one; 0 is any.")] = 7860,
    runs: Annotated[str, typer.Option(help="Folder with the runs.")] = "runs",
    allow_host: Annotated[list[str] | None, typer.Option(help="Another host name that browsers may use.")] = None,
) -> None:
    """Start the web page and print its link.

    The link has a token. Ctrl-C ends the page; runs continue.

    Example:  finetune ui
    """
    from finetune.cli.ui import start_page

    raise typer.Exit(start_page(host=host, port=port, runs=runs, allow_host=allow_host or []))


@cli.command()
def doctor(
    recipe: Annotated[str | None, typer.Argument(metavar="RECIPE", help="Also check what this recipe needs.")] = None,
    overrides: Overrides = None, model: Model = None, data: Data = None, json: Json = False,
) -> None:  # fmt: skip
    """Check driver, packages, memory, disk, hub and port.

    Takes about ten seconds; each problem comes with a fix. Exit code 1 when a check fails.

    Example:  finetune doctor tiny-cpu
    """
    from finetune.cli.doctor import show_doctor

    raise typer.Exit(show_doctor(recipe, overrides or [], model=model, data=data, as_json=json))


for _command in cli.registered_commands:
    _command.epilog = "Exit codes of all commands:  finetune --help"
