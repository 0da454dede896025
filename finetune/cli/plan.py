"""`finetune plan`."""

from __future__ import annotations

import json
import re
import shlex
from collections.abc import Iterator
from functools import partial

from rich.markup import escape
from rich.padding import Padding
from rich.table import Table

from finetune.card.visible import hide_gpus
from finetune.cli.output import print_json, report
from finetune.cli.render import coloured, out, print_summary, show_progress, table
from finetune.cli.source import option_bytes, recipe_of, require_dataset
from finetune.data.pictures.source import size_problem
from finetune.errors import CommandError, DataError
from finetune.planner.plan import AS_SET, Plan, Suggestion, Verdict
from finetune.recipe import NO_DATASET
from finetune.settings import Settings
from finetune.settings.compatibility import Sizes
from finetune.units import format_bytes

_IMAGES = re.compile(r"(\d{1,6})[xX](\d{1,6})(?:[xX](\d{1,3}))?")
_MOST_PICTURES = 64  # of a row, in a plan without data
_CHECKPOINTING = {False: "off", True: "every layer", "selective": "all but attention", "offload": "inputs offloaded"}


def show_plan(
    source: str | None, overrides: list[str], *, model: str | None, data: str | None, gpu: str | None, free: str | None,
    largest: str | None = None, images: str | None = None, why: bool = False, measure: bool = False, as_json: bool,
    alone: bool = False,
) -> int:  # fmt: skip
    """Print a plan, or the plan of the `largest` that fits."""
    recipe = recipe_of(source, overrides if gpu is None else [*overrides, f"gpu={json.dumps(gpu)}"], model=model, data=data)
    if alone:  # else the dry run opens a CUDA context of 0.3 to 0.5 GiB
        hide_gpus()
    from finetune.card import find_card
    from finetune.planner.planning import encode_rows, plan_largest, plan_recipe, read_rows, rows_with_pictures, without_rows

    has_data = recipe.dataset.path != NO_DATASET
    if images is not None and has_data:
        raise CommandError("--images is for a plan without data, and this recipe has a dataset", "Leave out --images.")

    with show_progress(quiet=as_json) as progress:
        assumed_rows = without_rows if images is None else rows_with_pictures(_picture_sizes(images))
        rows = partial(read_rows, encode=lambda recipe: encode_rows(recipe, progress)) if has_data else assumed_rows
        free = f"{free}GiB" if free and free.isdecimal() and len(free) <= 4 else free  # --free 24 means GiB, not bytes
        card = find_card(recipe.gpu, free_bytes=option_bytes("--free", free), processes=recipe.launch.processes_here)
        if measure:
            from finetune.evaluate.quantisation import measure_recipe

            require_dataset(recipe)
            cost = measure_recipe(recipe, progress, force=True)

        if largest:
            answer = plan_largest(recipe, card, rows, largest, progress)
            plan, overrides = answer.plan, [*overrides, *answer.overrides]
        else:
            plan = plan_recipe(recipe, card, rows, progress=progress, compare=why or as_json)
    if not has_data:
        plan = plan.with_note(f"no dataset is given: planned for rows of {plan.settings.max_length:,} tokens; add --data FILE")
    if as_json:
        values = {**vars(answer), "plan": plan.as_json()} if largest else plan.as_json()
        print_json({**values, "quantisation": cost.as_json()} if measure else values)
        return plan.exit_code
    if why:
        _print_details(plan)
    print_summary(plan)
    if largest:
        out.print(f"\n[bold]{escape(answer.sentence)}[/]", *(f"with {row.plan}" for row in plan.alternatives if row.chosen))
    else:
        _print_choices(plan)
    if measure:
        out.print(f"\n{escape(cost.sentence)}")
    out.print("" if why else "\n[dim]All settings, other plans and reasons: add --why[/]")
    options = {"--model": model, "--data": data if has_data else "FILE"}
    typed = [source] if source else []
    typed += [f"{name} {shlex.quote(value)}" for name, value in options.items() if value]
    if todo := next_command(plan, typed, [*overrides, f"gpu={gpu}"] if gpu else overrides):
        out.print(escape(todo), soft_wrap=True)
    return plan.exit_code


def _picture_sizes(text: str) -> Sizes:
    match = _IMAGES.fullmatch(text.strip())
    width, height, count = (int(part or 1) for part in match.groups()) if match else (0, 0, 0)
    if not 1 <= count <= _MOST_PICTURES:
        raise CommandError(
            f"--images {text[:40]} is not an image's width and height in pixels",
            "For example  --images 1024x768,  or, for three images in each row,  --images 1024x768x3.",
        )
    if problem := size_problem(width, height):
        raise CommandError(f"--images {text}: an image that {problem}", "Runs refuse such images, too.")
    return ((width, height),) * count


def next_command(plan: Plan, arguments: list[str], overrides: list[str]) -> str:
    """Return the command to type next, empty if a fix is printed. `arguments`: recipe, model and data as typed."""
    sufficient = _sufficient_suggestions(plan)
    if plan.data_problem or plan.card.problem or (plan.verdict == Verdict.NO_FIT and not sufficient):
        return ""
    verb, where = "run", ""
    if plan.verdict == Verdict.NO_FIT:
        verb, overrides = "plan", [*overrides, *sufficient[0].override.split()]
    elif plan.card.source == "catalogue":  # this GPU is in another machine, where gpu=auto chooses it
        where, overrides = " on that machine", [*overrides, "gpu=auto"]
    # the last override of a setting counts
    by_setting = {override.partition("=")[0]: shlex.quote(override) for override in overrides}
    return " ".join([f"Next{where}: finetune {verb}", *arguments, *by_setting.values()])


def _print_choices(plan: Plan) -> None:
    shown = table("setting", "value", "reason")
    for name, value, setting in _choices(plan.settings):
        shown.add_row(name, value, f"[dim]{escape(plan.reasons.get(setting) or AS_SET)}[/]")
    others = _changes(plan) if plan.verdict == Verdict.NO_FIT else _alternatives(plan)
    for part in (shown, others):
        if part.row_count:
            out.print("", part)
    if plan.verdict == Verdict.NO_FIT:
        out.print("The largest model that fits:  finetune plan RECIPE --largest model")
    if plan.data_problem:
        report(DataError(list(plan.data_problem.problems), plan.data_problem.fix))


def _choices(settings: Settings) -> Iterator[tuple[str, str, str]]:
    # name, value, and the setting that has the reason
    base, target = settings.base_format, settings.layer_offloading
    checkpointing, every_n = settings.activation_checkpointing, settings.activation_checkpointing_every_n_layers
    rows, micro_batches = settings.per_device_train_batch_size, settings.gradient_accumulation_steps
    # 16-bit weights have no switch: their reason is at load_in_4bit
    yield "weights", base.label, base.setting or "load_in_4bit"
    yield "checkpointing", f"1 layer in {every_n}" if every_n > 1 else _CHECKPOINTING[checkpointing], "activation_checkpointing"
    yield "micro-batch", f"{rows} x {micro_batches}", "per_device_train_batch_size"
    if target:
        yield "offloading", f"{settings.offloaded_layers} layers to {'host' if target == 'cpu' else 'disk'}", "layer_offloading"
    else:
        yield "optimizer", settings.optim, "optim"
    yield "LoRA rank", f"{settings.lora_r}", "lora_r"
    yield "learning rate", f"{settings.learning_rate:g}", "learning_rate"


def _alternatives(plan: Plan) -> Table:
    shown = table(">at most", ">tokens/s", "verdict", "other plans")
    chosen_parts = next((row.plan for row in plan.alternatives if row.chosen), "").split(", ")
    rows = [row for row in plan.alternatives if not row.chosen]
    for row in sorted(rows, key=lambda row: row.verdict == Verdict.NO_FIT):
        change = ", ".join(part for part in row.plan.split(", ") if part not in chosen_parts) or row.differs
        speed = f"{row.tokens_per_s:,.0f}" if row.tokens_per_s else "-"
        shown.add_row(format_bytes(row.peak_high_bytes), speed, coloured(row.verdict, row.verdict), escape(change))
    return shown


def _changes(plan: Plan) -> Table:
    sufficient = _sufficient_suggestions(plan)
    shown = table(">at most", f"{'fits' if sufficient else 'smaller, but too big'} with", "cost")
    for row in sufficient or plan.suggestions:
        shown.add_row(format_bytes(row.peak_bytes), escape(row.override), escape(row.cost))
    return shown


def _print_details(plan: Plan) -> None:
    if forecast := plan.forecast:
        overhead = forecast.peak_bytes - forecast.allocated_bytes
        shown = table("at the training peak", ">bytes")
        for name, size in {**forecast.parts, "allocator and context": overhead, "whole GPU": forecast.peak_bytes}.items():
            if size > 0:
                shown.add_row(name, format_bytes(size))
        out.print(shown)
        peaks = ", ".join(f"{phase} {format_bytes(size)}" for phase, size in forecast.peaks.items())
        out.print(f"[dim]allocated at most: {peaks}\nmethod: {forecast.method}[/]\n")
        if copies := plan.layer_copies:
            pinned = f"{format_bytes(copies.pinned_bytes)} of host memory are pinned"
            out.print(f"{copies.layers} of {copies.of_layers} layers are offloaded, {pinned}; {copies.summary}")
    entries = {f"{name} = {getattr(plan.settings, name, '')}": reason for name, reason in plan.reasons.items()}
    entries |= {f"{row.plan}: {row.verdict}": "chosen" if row.chosen else row.differs for row in plan.alternatives}
    for name, reason in entries.items():
        out.print(f"[bold]{escape(name)}[/]")
        out.print(Padding(f"[dim]{escape(reason)}[/]", (0, 0, 0, 4)))
    out.print()


def _sufficient_suggestions(plan: Plan) -> list[Suggestion]:
    return [row for row in plan.suggestions if row.peak_bytes <= plan.usable_bytes]
