"""Table of commands and their options."""

from __future__ import annotations

from importlib import import_module
from inspect import Parameter, Signature, signature
from typing import Annotated, Any, Literal

import typer

from finetune.errors import CAUSES
from finetune.evaluate.scorers import SCORES
from finetune.export import GGUF_TYPES, LAYOUTS
from finetune.requirements import refuse_missing_extra

# pretty_exceptions_enable: `entry` prints errors itself
cli = typer.Typer(
    name="finetune", no_args_is_help=True, add_completion=True, rich_markup_mode="rich", pretty_exceptions_enable=False,
    help="Fine-tune language models with LoRA on your own GPU: forecast what fits, train, resume, chat, export.",
    epilog="Start here:  finetune run tiny-cpu\n\nExit codes: 0 done, 1 internal error, "
    f"{', '.join(f'{code} {cause}' for code, cause in CAUSES.items())}, 130 or 143 paused",
    context_settings={"help_option_names": ["-h", "--help"]},
)  # fmt: skip


def command(
    group: str, name: str, function: str, summary: str, parameters: list[Parameter], details: str = "", *examples: str,
    rare: str = "", extra: str = "",
) -> None:  # fmt: skip
    """Register a command. `function`: MODULE.NAME in finetune.cli. `rare`: parameters that only --help-all lists."""

    def call(context: typer.Context, **options: Any) -> Any:
        options.pop("help_all", None)
        if extra:
            refuse_missing_extra(extra, f"finetune {name}")
        # imported when the command runs: --help and wrong usage import no torch
        module, attribute = function.split(".")
        run = getattr(import_module(f"finetune.cli.{module}"), attribute)
        if "alone" in signature(run).parameters:
            options["alone"] = bool(context.obj)  # from `entry.main`: the process runs nothing else
        return run(**options)

    context = Parameter("context", Parameter.KEYWORD_ONLY, annotation=typer.Context)
    # typer reads options from the signature, and gives --no-NAME to each bool without flags
    for parameter in parameters:  # `rare` must not name a parameter that other commands share
        parameter.default.hidden |= parameter.name in rare.split()
    call.__signature__ = Signature([context, *parameters, *([HELP_ALL] if rare else [])])  # type: ignore[attr-defined]
    text = "\n\n".join([summary, details, *(f"Example:  finetune {example}" for example in examples)])
    epilog = "Exit codes of all commands:  finetune --help"
    cli.command(name, help=text, rich_help_panel=group, epilog=epilog)(call)


def argument(name: str, metavar: str, text: str, default: Any = None, type_: Any = str) -> Parameter:
    """Return a positional argument; `...` means required."""
    value = typer.Argument(default, metavar=metavar, help=text)
    return Parameter(name, Parameter.KEYWORD_ONLY, default=value, annotation=type_)


def option(name: str, text: str, default: Any = None, type_: Any = str, flags: tuple[str, ...] = (), **rules: Any) -> Parameter:
    """Return an option, by default --NAME."""
    value = typer.Option(default, *flags, help=text, **rules)
    return Parameter(name, Parameter.KEYWORD_ONLY, default=value, annotation=type_)


def flag(name: str, text: str, *flags: str, **rules: Any) -> Parameter:
    """Return an option without a value."""
    return option(name, text, False, bool, flags or (f"--{name.replace('_', '-')}",), **rules)


def output(text: str) -> Parameter:
    """Return the option --output, -o."""
    return option("output", text, flags=("--output", "-o"))


def _show_all(context: typer.Context, is_set: bool) -> None:
    if is_set:
        for parameter in context.command.params:
            parameter.hidden = False  # type: ignore[attr-defined]
        context.get_help()  # prints it
        raise typer.Exit


#: For commands with hidden options: --help lists at most eight.
HELP_ALL = flag("help_all", "Show all options.", is_eager=True, callback=_show_all)
START, RUNS, RESULT, MACHINE = "Start", "Runs", "Result", "Machine"  # groups of commands in --help
OVERRIDES = argument("overrides", "key=value", "Settings that override the recipe; the last one wins.", [], list[str])
MODEL = option("model", "Model to train: hub id, short name or folder.")
DATA = option("data", "Dataset to train on: file or hub id.")
JSON = flag("as_json", "Print JSON.", "--json")
RECIPE = [
    argument("source", "RECIPE", "Recipe file, shipped recipe, or model name."), OVERRIDES, MODEL, DATA, JSON
]  # fmt: skip
RUN_TEXT = "Run directory, run name, or 'latest'."
RUN = [argument("source", "RUN", RUN_TEXT, "latest"), JSON]

# fmt: off
# --help lists the commands in this order
command(
    START, "run", "run.run_recipe", "Plan, check, train and watch a run.",
    [
        *RECIPE,
        flag("force", "Start even if the forecast says that the run does not fit."),
        flag("detach", "Start in the background and return."),
        flag("measure", "First measure the held-out loss in 16 bit, int8 and NF4.", "--measure-quantisation"),
    ],
    "The time left is estimated from the newest steps. Ctrl-C finishes the current step, saves a checkpoint and stops.",
    "run tiny-cpu", "run 7b-4090 lora_r=32 output_dir=runs/try2", "run --model Qwen/Qwen3-4B --data mine.jsonl"
)
command(
    START, "plan", "plan.show_plan", "Forecast memory and find the fastest settings that fit.",
    [
        *RECIPE,
        option("gpu", "GPU to plan for: index in nvidia-smi, or a name such as rtx-4090."),
        option("free", "Free GPU memory to assume, e.g. 22.1GiB."),
        option("largest", "Find the largest max_length, lora_r, per_device_train_batch_size or model that fits."),
        option("images", "Without data: images of each example, e.g. 1024x1024, or 1024x1024x3 for three."),
        flag("why", "Also print memory by part, every setting with its reason, and other plans."),
        flag("measure", "Measure the base model's held-out loss in 16 bit, int8 and NF4.", "--measure-quantisation"),
    ],
    "Earlier runs on this GPU correct the run time. Weights are loaded only with --measure-quantisation.\n\n"
    "Exit codes: 0 the run fits, 3 it does not fit or the GPU can't be used, 4 the data needs a change.",
    "plan 7b-4090 --gpu rtx-4090 max_length=4096", "plan Qwen/Qwen2.5-7B-Instruct --gpu 4090",
    "plan 8b-3090 --largest max_length", "plan Qwen/Qwen3-VL-8B-Instruct --gpu 4090 --images 1024x1024",
    "plan tiny-cpu --measure-quantisation", rare="free images measure"
)
command(
    START, "data", "data.show_data", "Show the training data: rows, lengths, and a marked example.", RECIPE,
    "Exit code 4 if a run would refuse the rows.", "data tiny-cpu --data rows.jsonl"
)
command(
    START, "sweep", "sweep.sweep_command", "Compare runs of a recipe that differ in a few settings.",
    [
        argument("source", "RECIPE", "Recipe file, shipped recipe, model name, or the folder of a sweep."),
        argument("overrides", "key=value,...", "Values to try; a single value applies to every arm.", [], list[str]),
        MODEL, DATA, JSON,
        flag("show", "Show a sweep without continuing it."),
    ],
    "Without values, tries five learning rates around the recommended one. Arms that fall behind are stopped early. "
    "Ctrl-C stops the sweep after the step, with a checkpoint; to continue it, give its folder. Needs the extra `sweep`.",
    "sweep tiny-cpu", "sweep 7b-4090 learning_rate=1e-4,2e-4,4e-4 lora_r=16,64",
    "sweep runs/tiny-1a2b3c4d-sweep", extra="sweep"
)
command(
    START, "recipes", "recipes.show_recipes", "List, show or copy recipes; list all settings or known models.",
    [
        argument("verb", "VERB", "list, show NAME, copy NAME, keys, or models.", "list"),
        argument("name", "NAME", "Name of a shipped recipe."),
        JSON,
    ],
    "`keys` lists every setting, `models` the models that can be planned offline.", "recipes copy 7b-4090"
)
command(
    START, "convert", "recipes.convert_file", "Turn another tool's configuration into a recipe.",
    [
        argument("source", "FILE", "Configuration file of the other tool.", ...), OVERRIDES, MODEL, DATA, JSON,
        output("File to write; default standard output."),
    ],
    "Reads files of LLaMA-Factory, Axolotl and TRL.", "convert qwen3_lora_sft.yaml -o recipe.yaml"
)
command(
    START, "ui", "ui.start_page", "Start the web page and print its link.",
    [
        # 127.0.0.1: other machines can't reach the page unless asked
        option("host", "Address to listen on; the page always requires its token.", "127.0.0.1"),
        option("port", "Port; if it is taken, the next free one. 0: any port.", 7860, int),
        option("runs", "Folder with the runs.", "runs"),
        option("allow_host", "Additional host name that browsers may use.", [], list[str]),
    ],
    "The link contains a token. Ctrl-C stops the page; runs continue.", "ui", extra="ui"
)
command(
    RUNS, "runs", "runs.change_runs", "List, show, delete or rename runs.",
    [
        argument("verb", "VERB", "list, show RUN, rm RUN ..., or rename RUN NAME.", "list"),
        argument("names", "RUN", "Run directories, names or 'latest'.", [], list[str]),
        JSON,
        flag("memory", "show: peak memory by phase, forecast against measured."),
    ],
    "`show` prints a run's step, losses, scores and recipe; --memory prints peak memory by phase. "
    "Deleted runs move to .trash in their folder.",
    "runs show latest", "runs show latest --memory", "runs rename latest support-2"
)
command(
    RUNS, "watch", "run.watch_run", "Follow a running run, or show how it ended.", RUN, "", "watch latest"
)
command(
    RUNS, "pause", "run.pause_run", "Pause a run after its step; `resume` continues bit-exactly.",
    [
        *RUN,
        flag("now", "Stop immediately, without a checkpoint."),
        flag("all_runs", "Pause all running runs.", "--all"),
    ],
    "The run writes a checkpoint and frees the GPU.", "pause latest", "pause --all"
)
command(
    RUNS, "finish", "run.finish_run", "End a run after its step; its best step is the result.", RUN,
    "", "finish latest"
)
command(
    RUNS, "resume", "run.resume_run", "Resume a run from its newest verified checkpoint.",
    [RUN[0], OVERRIDES, JSON], "Settings that don't change the training steps may change.",
    "resume runs/tiny-1a2b3c4d", "resume latest save_steps=50 eval_steps=100"
)
command(
    RUNS, "compare", "ui.compare_runs", "Compare several runs in one HTML file.",
    [
        argument("sources", "RUN", "Run directories, names or 'latest'; two or more.", ..., list[str]), JSON,
        output("File to write; default comparison.html."),
    ],
    "Curves, settings that differ, and paired scores on rows that both runs were scored on.", "compare first second"
)
command(
    RESULT, "eval", "evaluate.evaluate_run", "Score base and tuned model on held-out rows or a file.",
    [
        *RUN,
        option("rows", "Score only this many rows.", type_=int, min=1),
        option("data", "Score the rows of this file instead of the held-out rows."),
        option("probe", "Also measure forgetting: the loss on general questions.", True, bool),
        option("score", f"{', '.join(SCORES)}, or FILE.py:FUNCTION."),
        option("pattern", "regex: pattern whose matches in answer and expected answer are compared."),
        option("tolerance", "numeric: allowed relative difference, e.g. 0.01.", 0.0, float),
        option("show", "Rows to show.", "differ", Literal["differ", "worst", "best"]),
        option("examples", "Number of rows to show.", 2, int, min=0),
        flag("quantisation", "Only measure the loss of base and tuned model in 16 bit, int8 and NF4."),
    ],
    "Differences have a 95 % interval from a paired bootstrap. A killed evaluation continues with the remaining rows.",
    "eval latest", "eval latest --score json --data mine.jsonl", "eval latest --quantisation",
    rare="probe pattern tolerance examples quantisation"
)
command(
    RESULT, "chat", "chat.chat_command", "Chat with the tuned model, the base model, or both.",
    [
        *RUN,
        flag("base", "Chat with the base model only."),
        flag("both", "Get answers from base and tuned model, with the same seed."),
        option("prompt", "Answer one prompt and exit."),
        option("system", "System prompt."),
        option("max_new_tokens", "Maximum length of an answer, in tokens.", 512, int, min=1),
        option("temperature", "0 always takes the most likely token; higher values sample.", 0.0, float, min=0, max=5),
        option("top_p", "Top-p: sample from the most likely tokens of this total probability.", 1.0, float, min=0.01, max=1),
        option("seed", "Sampling seed.", 0, int, min=0, max=2**63 - 1),
        option("tools_file", "JSON file with a list of tools that the model may call.", flags=("--tools",), metavar="FILE"),
    ],
    "Answers are streamed. Ctrl-C stops an answer; a second Ctrl-C ends the chat.",
    'chat latest --prompt "My parcel is late."',
    'chat latest --both --temperature 0.7 --system "You route messages."',
    rare="max_new_tokens top_p seed tools_file"
)
command(
    RESULT, "merge", "export.merge_run", "Merge the adapter into the 16-bit base model.",
    [
        *RUN, output("Folder to write; default RUN/merged."),
        option("max_shard_size", "Maximum file size, e.g. 5GB; default as in the base model."),
    ],
    "Merges tensor by tensor where possible: then the model need not fit in memory.", "merge latest --output models/support"
)
command(
    RESULT, "export", "export.export_run", "Export to GGUF, checked in llama.cpp, with a Modelfile for Ollama.",
    [
        *RUN,
        option("to", "; ".join(f"{name}: {files}" for name, files in LAYOUTS.items()) + "; a model folder: finetune merge.",
               "gguf", Literal[*LAYOUTS]),
        option("kind", "Type of the weights.", "f16", Literal[*GGUF_TYPES], flags=("--type",), case_sensitive=False),
        option("llama_cpp", "Checkout of llama.cpp with its converter.", "llama.cpp", envvar="FINETUNE_LLAMA_CPP"),
        output("Folder to write; default RUN/gguf-TYPE."),
        option("rows", "Check the file on this many held-out rows.", 120, int, min=1),
        option("data", "Check it on the rows of this file instead of the held-out rows."),
    ],
    "Exit code 1 if tokens or chat template differ from the adapter's, or too many answers; the message names the stage.",
    "export latest --type q8_0 --llama-cpp ~/llama.cpp", rare="data"
)
command(
    RESULT, "push", "export.push_run", "Push adapter, merged model or GGUF to the hub.",
    [
        argument("source", "RUN", RUN_TEXT, ...), argument("repo", "REPO", "Hub repository, OWNER/NAME.", ...), JSON,
        flag("adapter", "Push the adapter; the default."),
        flag("merged", "Push the merged model, RUN/merged."),
        option("gguf", "Push GGUF files.", [], list[str], metavar="FILE"),
        flag("public", "Make the repository public; the default is private."),
        flag("update", "Allow a repository that already has files."),
        flag("dry_run", "List files and sizes; send nothing."),
        flag("yes", "Don't ask for confirmation.", "--yes", "-y"),
    ],
    "One commit with a model card; no rows of the dataset and no local paths are sent.",
    "push latest alice/support-lora --dry-run", rare="adapter update"
)
command(
    RESULT, "report", "ui.report_run", "Write a run as one HTML file: plan, forecast, curves, scores.",
    [*RUN, output("File to write; default RUN/report.html.")], "The file opens offline and can be printed.", "report latest"
)
command(
    RESULT, "serve", "serve.serve_run", "Serve a run with vLLM or llama.cpp, protected by a key.",
    [
        *RUN, option("port", "Port of the server.", 8000, int, min=1, max=65535),
        flag("only_commands", "Only print the commands.", "--commands"),
    ],
    "Starts the server if it is installed, else prints the commands.", "serve latest"
)
command(
    MACHINE, "doctor", "doctor.show_doctor", "Check driver, packages, memory, disk and hub.",
    [
        argument("source", "RECIPE", "Also check what this recipe needs."), OVERRIDES, MODEL, DATA, JSON,
        flag("measure", "Instead measure this GPU's speed, from which plans choose the fastest settings."),
    ],
    "Takes about ten seconds; each problem comes with a fix. Exit code 1 if a check fails.", "doctor tiny-cpu",
    "doctor --measure"
)
command(
    MACHINE, "cache", "doctor.use_cache", "Show or clear tokenised rows and images on disk.",
    [argument("verb", "VERB", "list, or clear.", "list"), JSON],
    "Both are recreated on demand.", "cache clear"
)
# fmt: on


@cli.callback(invoke_without_command=True)
def _options(
    version: Annotated[bool, typer.Option("--version", help="Print the versions of finetune and its packages.")] = False,
) -> None:
    if version:
        from finetune import __version__
        from finetune.cli.render import out
        from finetune.requirements import installed_version

        out.print(f"finetune {__version__}")
        for name in ("torch", "transformers", "trl", "peft", "bitsandbytes", "accelerate", "datasets", "gradio"):
            out.print(f"  {name} {installed_version(name) or 'is missing'}")
        raise typer.Exit
