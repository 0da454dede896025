"""`finetune plan`."""

from __future__ import annotations

import json
import re
import shlex
from collections.abc import Iterator
from functools import partial
from textwrap import wrap

from rich.markup import escape
from rich.padding import Padding

from finetune.card.visible import hide_gpus
from finetune.cli.output import print_json, report
from finetune.cli.render import coloured, out, print_summary, show_progress, table
from finetune.cli.source import option_bytes, recipe_of, require_dataset
from finetune.data.pictures.source import size_problem
from finetune.errors import CommandError, DataError
from finetune.planner.plan import AS_SET, Plan, Suggestion, Verdict
from finetune.recipe.load import NO_DATASET
from finetune.settings import Settings
from finetune.settings.base_formats import base_format_of
from finetune.settings.vision import Sizes
from finetune.units import format_bytes

_MOST_LINES = 25  # lines of a plan on a terminal of 80 columns
_WHY_HINT = "[dim]All settings, other plans, reasons and notes: add --why[/]\n"
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

    def with_data_note(plan: Plan) -> Plan:
        note = f"no dataset is given: planned for rows of {plan.settings.max_length:,} tokens; add --data FILE"
        return plan if has_data else plan.with_note(note)

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
    plan = with_data_note(plan)
    if as_json:
        values = {**vars(answer), "plan": plan.as_json()} if largest else plan.as_json()
        print_json({**values, "quantisation": cost.as_json()} if measure else values)
        return plan.exit_code
    if why:
        _print_details(plan)
    line_count = print_summary(plan)
    if largest:
        out.print(f"\n[bold]{escape(answer.sentence)}[/]", *(f"with {row.plan}" for row in plan.alternatives if row.chosen))
    else:
        _print_choices(plan, _MOST_LINES - line_count - 3)
    if measure:
        out.print(f"\n{escape(cost.sentence)}")
    options = [f"--{name} {shlex.quote(value)}" for name, value in (("model", model), ("data", data)) if value]
    overrides = [*overrides, f"gpu={gpu}"] if gpu else overrides
    todo = next_command(plan, [source, *options] if source else options, overrides, has_data=has_data)
    out.print(f"\n{'' if why else _WHY_HINT}{escape(todo)}", soft_wrap=True)
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


def next_command(plan: Plan, arguments: list[str], overrides: list[str], *, has_data: bool) -> str:
    """Return the command to type next. `arguments`: recipe, model and data as typed."""
    if plan.data_problem:
        return "First correct the data: see above"
    if plan.card.problem:
        return f"torch can't use this GPU. {plan.card.problem_fix}"
    verb, where = "run", ""
    if plan.verdict == Verdict.NO_FIT:
        if not (sufficient := _sufficient_suggestions(plan)):
            return ""
        verb, overrides = "plan", [*overrides, *sufficient[0].override.split()]
    elif plan.card.source == "catalogue":  # this GPU is in another machine, where gpu=auto chooses it
        where, overrides = " on that machine", [*overrides, "gpu=auto"]
    # the last override of a setting counts
    by_setting = {override.partition("=")[0]: shlex.quote(override) for override in overrides}
    data_option = [] if has_data else ["--data FILE"]
    return " ".join([f"Next{where}: finetune {verb}", *arguments, *by_setting.values(), *data_option])


def _print_choices(plan: Plan, most_lines: int) -> None:
    lines, width = [""], max(20, out.width - 36)
    for name, value, setting in _choices(plan.settings):
        reason, *more = _shortened(plan.reasons.get(setting) or AS_SET, value, width)
        lines.append(f"{name:15}{value:20}[dim]{escape(reason)}[/]")
        lines += [f"{'':35}[dim]{escape(line)}[/]" for line in more]
    others = _changes(plan) if plan.verdict == Verdict.NO_FIT else _alternatives(plan)
    if others:
        lines += ["", *others[: max(3, most_lines - len(lines) - 1)]]
    for line in lines:
        out.print(line, no_wrap=True, overflow="ellipsis")
    if plan.data_problem:
        report(DataError(list(plan.data_problem.problems), plan.data_problem.fix))


def _choices(settings: Settings) -> Iterator[tuple[str, str, str]]:
    # name, value, and the setting that has the reason
    base, target = base_format_of(settings), settings.layer_offloading
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


def _shortened(reason: str, value: str, width: int) -> list[str]:
    # drops clauses from the end until the reason fits a line, else wraps it to three
    if reason.startswith(value):  # printed beside it
        reason = reason.partition(": ")[2] or reason
    clause_ends = [len(reason), *(end.start() for end in reversed(list(re.finditer(r"; |: | \([^()]*\)$", reason))))]
    line = next((reason[:end] for end in clause_ends if end <= width), "")
    return [line] if line else wrap(reason, width, max_lines=3, placeholder=" …")


def _alternatives(plan: Plan) -> list[str]:
    chosen_parts = next((row.plan for row in plan.alternatives if row.chosen), "").split(", ")
    rows = sorted((row for row in plan.alternatives if not row.chosen), key=lambda row: row.verdict == Verdict.NO_FIT)
    lines = [f"{'at most':>9}  {'tokens/s':>8}  {'verdict':15}  other plans"] if rows else []
    for row in rows:
        change = ", ".join(part for part in row.plan.split(", ") if part not in chosen_parts) or row.differs
        speed = f"{row.tokens_per_s:,.0f}" if row.tokens_per_s else "-"
        verdict = coloured(row.verdict, f"{row.verdict:15}")
        lines.append(f"{format_bytes(row.peak_high_bytes):>9}  {speed:>8}  {verdict}  {escape(change)}")
    return lines


def _changes(plan: Plan) -> list[str]:
    sufficient = _sufficient_suggestions(plan)
    rows = [(format_bytes(row.peak_bytes), f"{row.override} ({row.cost})") for row in sufficient or plan.suggestions]
    rows.append(("", "a smaller model: finetune plan RECIPE --largest model"))
    lines = [f"{'at most':>9}  {'fits' if sufficient else 'smaller, but too big'} with"]
    for size, change in rows:
        first, *more = wrap(change, max(20, out.width - 11))
        lines += [f"{size:>9}  {escape(first)}", *(f"{'':11}{escape(line)}" for line in more)]
    return lines


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
        for note in forecast.notes:
            out.print(f"note: {escape(note)}")
    entries = {f"{name} = {getattr(plan.settings, name, '')}": reason for name, reason in plan.reasons.items()}
    entries |= {f"{row.plan}: {row.verdict}": "chosen" if row.chosen else row.differs for row in plan.alternatives}
    for name, reason in entries.items():
        out.print(f"[bold]{escape(name)}[/]")
        out.print(Padding(f"[dim]{escape(reason)}[/]", (0, 0, 0, 4)))
    out.print()


def _sufficient_suggestions(plan: Plan) -> list[Suggestion]:
    return [row for row in plan.suggestions if row.peak_bytes <= plan.usable_bytes]
