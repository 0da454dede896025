"""`finetune plan`: verdict, memory, time, settings and alternatives."""

from __future__ import annotations

import json
import re
import shlex
from collections.abc import Iterator
from textwrap import wrap

from rich.markup import escape
from rich.padding import Padding

from finetune.card.visible import hide_gpus
from finetune.cli.output import print_json, report
from finetune.cli.render import coloured, out, print_summary, show_progress, table
from finetune.cli.source import bytes_of, recipe_of, require_dataset
from finetune.data.pictures.source import size_problem
from finetune.errors import CommandError, DataError
from finetune.planner.plan import AS_SET, Plan, Suggestion, Verdict
from finetune.recipe.load import NO_DATASET
from finetune.settings import Settings
from finetune.settings.base_formats import base_format_of
from finetune.settings.vision import Sizes
from finetune.units import format_bytes

_LINES = 25  # lines of a plan on a terminal of 80 columns
_MORE = "[dim]All settings, reasons and notes: add --why[/]\n"
_IMAGES = re.compile(r"(\d{1,6})[xX](\d{1,6})(?:[xX](\d{1,3}))?")
_MOST_PICTURES = 64  # pictures of a row that are planned without data
_CHECKPOINTING = {False: "off", True: "every layer", "selective": "all but attention", "offload": "inputs offloaded"}


def show_plan(
    source: str | None, overrides: list[str], *, model: str | None, data: str | None, gpu: str | None, free: str | None,
    largest: str | None = None, images: str | None = None, why: bool = False, measure: bool = False, as_json: bool,
    alone: bool = False,
) -> int:  # fmt: skip
    """Print a plan, with `largest` the largest that fits."""
    recipe = recipe_of(source, [*overrides, *([f"gpu={json.dumps(gpu)}"] if gpu is not None else [])], model=model, data=data)
    if alone:  # a dry run would open a CUDA context of 0.3 to 0.5 GiB
        hide_gpus()
    from finetune.card import find_card
    from finetune.planner.planning import encode_rows, plan_largest, plan_recipe, read_rows, rows_with_pictures, without_rows

    without = recipe.dataset.path == NO_DATASET
    if images is not None and not without:
        raise CommandError("--images is for a plan without data, and this recipe has a dataset", "Leave out --images.")

    def noted(plan: Plan) -> Plan:
        note = f"no dataset is given: planned for rows of {plan.settings.max_length:,} tokens; add --data FILE"
        return plan.with_note(note) if without else plan

    with show_progress(quiet=as_json) as progress:
        unread = without_rows if images is None else rows_with_pictures(_picture_sizes(images))
        rows = unread if without else lambda recipe: read_rows(recipe, lambda recipe: encode_rows(recipe, progress))
        free = f"{free}GiB" if free and free.isdecimal() and len(free) <= 4 else free  # nobody means 24 bytes
        card = find_card(recipe.gpu, free_bytes=bytes_of("--free", free), processes=recipe.launch.processes_here)
        lines: list[int] = []
        if measure:
            from finetune.evaluate.quantisation import measure_recipe

            require_dataset(recipe)
            cost = measure_recipe(recipe, progress, force=True)

        def show(plan: Plan) -> None:  # the alternatives take seconds to forecast
            progress("")  # the status line would be drawn over the plan
            lines.append(print_summary(noted(plan)))

        if largest:
            answer = plan_largest(recipe, card, rows, largest, progress)
            plan, overrides = answer.plan, [*overrides, *answer.overrides]
        else:
            plan = plan_recipe(recipe, card, rows, progress=progress, compare=True, show=None if as_json or why else show)
    plan = noted(plan)
    if as_json:
        values = {**vars(answer), "plan": plan.as_json()} if largest else plan.as_json()
        print_json({**values, "quantisation": cost.as_json()} if measure else values)
        return plan.exit_code
    if why:
        _print_details(plan)
    lines = lines or [print_summary(plan)]
    if largest:
        out.print(f"\n[bold]{escape(answer.sentence)}[/]", *(f"with {row.plan}" for row in plan.alternatives if row.chosen))
    else:
        _print_choices(plan, _LINES - lines[0] - 3)
    if measure:
        out.print(f"\n{escape(cost.sentence)}")
    options = (f"--{name} {shlex.quote(value)}" for name, value in (("model", model), ("data", data)) if value)
    overrides = [*overrides, f"gpu={gpu}"] if gpu else overrides
    todo = next_command(plan, [*filter(None, [source]), *options], overrides, without=without)
    out.print(f"\n{'' if why else _MORE}{escape(todo)}", soft_wrap=True)
    return plan.exit_code


def _picture_sizes(text: str) -> Sizes:
    match = _IMAGES.fullmatch(text.strip())
    width, height, count = (int(part or 1) for part in match.groups()) if match else (0, 0, 0)
    if not match or not 1 <= count <= _MOST_PICTURES:
        raise CommandError(
            f"--images {text[:40]} is not an image's width and height in pixels",
            "For example  --images 1024x768,  or, for three images in each row,  --images 1024x768x3.",
        )
    if problem := size_problem(width, height):
        raise CommandError(f"--images {text}: an image that {problem}", "Runs refuse such images, too.")
    return ((width, height),) * count


def next_command(plan: Plan, arguments: list[str], overrides: list[str], *, without: bool) -> str:
    """Return the next command. `arguments`: recipe, model and data as typed."""
    if plan.data_problem:
        return "First correct the data: see above"
    if plan.card.problem:
        return f"torch can't use this GPU. {plan.card.problem_fix}"
    # a card of the catalogue is in another machine, which has to choose its GPU itself
    verb, changes, where = "run", ["gpu=auto"], " on that machine"
    if plan.verdict == Verdict.NO_FIT:
        if not (enough := _enough(plan)):
            return ""
        verb, changes, where = "plan", enough[0].override.split(), ""
    elif plan.card.source != "catalogue":
        changes, where = [], ""
    # the last override of a setting counts
    last = {override.partition("=")[0]: shlex.quote(override) for override in [*overrides, *changes]}
    return " ".join([f"Next{where}: finetune {verb}", *arguments, *last.values(), *(["--data FILE"] if without else [])])


def _print_choices(plan: Plan, most_lines: int) -> None:
    lines, width = [""], max(20, out.width - 36)
    for name, value, setting in _choices(plan.settings):
        reason, *more = _shortened(plan.reasons.get(setting) or AS_SET, value, width)
        lines += [f"{name:15}{value:20}[dim]{escape(reason)}[/]", *(f"{'':35}[dim]{escape(line)}[/]" for line in more)]
    others = _changes(plan) if plan.verdict == Verdict.NO_FIT else _alternatives(plan)
    lines += ["", *others[: max(3, most_lines - len(lines) - 1)]] if others else []
    for line in lines:
        out.print(line, no_wrap=True, overflow="ellipsis")
    if plan.data_problem:
        report(DataError(list(plan.data_problem.problems), plan.data_problem.fix))


def _choices(settings: Settings) -> Iterator[tuple[str, str, str]]:
    base, target = base_format_of(settings), settings.layer_offloading
    kind, every = settings.activation_checkpointing, settings.activation_checkpointing_every_n_layers
    micro = "per_device_train_batch_size"
    # 16-bit weights have no switch: their reason is at load_in_4bit
    yield "weights", base.label, base.setting or "load_in_4bit"
    yield "checkpointing", f"1 layer in {every}" if every > 1 else _CHECKPOINTING[kind], "activation_checkpointing"
    yield "micro-batch", f"{getattr(settings, micro)} x {settings.gradient_accumulation_steps}", micro
    if target:
        yield "offloading", f"{settings.offloaded_layers} layers to {'host' if target == 'cpu' else 'disk'}", "layer_offloading"
    else:
        yield "optimizer", settings.optim, "optim"
    yield "LoRA rank", f"{settings.lora_r}", "lora_r"
    yield "learning rate", f"{settings.learning_rate:g}", "learning_rate"


def _shortened(reason: str, value: str, width: int) -> list[str]:
    # drops clauses from the end until the reason fits a line, else wraps it to three
    reason = (reason.startswith(value) and reason.partition(": ")[2]) or reason
    clauses = [reason, *(reason[: end.start()] for end in reversed(list(re.finditer(r"; |: | \([^()]*\)$", reason))))]
    line = next((text for text in clauses if len(text) <= width), "")
    return [line] if line else wrap(reason, width, max_lines=3, placeholder=" …")


def _alternatives(plan: Plan) -> list[str]:
    chosen = next((row.plan for row in plan.alternatives if row.chosen), "").split(", ")
    rows = sorted((row for row in plan.alternatives if not row.chosen), key=lambda row: row.verdict == Verdict.NO_FIT)
    lines = [f"{'at most':>9}  {'tokens/s':>8}  {'verdict':15}  other plans"] if rows else []
    for row in rows:
        change = ", ".join(part for part in row.plan.split(", ") if part not in chosen) or row.differs
        speed = f"{row.tokens_per_s:,.0f}" if row.tokens_per_s else "-"
        verdict = coloured(row.verdict, f"{row.verdict:15}")
        lines.append(f"{format_bytes(row.peak_high_bytes):>9}  {speed:>8}  {verdict}  {escape(change)}")
    return lines


def _changes(plan: Plan) -> list[str]:
    enough = _enough(plan)
    rows = [(format_bytes(row.peak_bytes), f"{row.override} ({row.cost})") for row in enough or plan.suggestions]
    for needs in plan.many_cards.rows if plan.many_cards else ():
        if needs.verdict and needs.verdict.fits and needs.peak_high_bytes:
            rows.append((format_bytes(needs.peak_high_bytes), f"{needs.override} (each GPU)"))
            break
    if plan.shortfall and (largest := plan.shortfall.largest_model_that_fits):
        rows.append(("", f"{largest}, the largest catalogue model that fits"))
    lines = [f"{'at most':>9}  {'fits' if enough else 'smaller, but too big'} with"]
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
    for needs in plan.many_cards.rows if plan.many_cards else ():
        least = f"{format_bytes(needs.peak_high_bytes)} at most on each GPU, {format_bytes(needs.host_bytes)} of host memory"
        fits = {f"{needs.strategy}: {needs.verdict}": f"{least}; {needs.override}"}
        entries |= fits if needs.verdict else {needs.strategy: needs.cost}
    for name, reason in entries.items():
        out.print(f"[bold]{escape(name)}[/]")
        out.print(Padding(f"[dim]{escape(reason)}[/]", (0, 0, 0, 4)))
    out.print()


def _enough(plan: Plan) -> list[Suggestion]:
    return [row for row in plan.suggestions if row.peak_bytes <= plan.usable_bytes]
