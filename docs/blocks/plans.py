"""Blocks made of plans: the output of `finetune plan`, the shipped recipes, what fits which card."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import io
import math

from blocks.page import GIB, block, cells, markdown

#: Rows of the table of needs: names in the model catalogue, in the order of their needs.
MODELS = (
    "LiquidAI/LFM2.5-1.2B-Instruct", "Qwen/Qwen3.5-2B", "Qwen/Qwen3.5-4B", "meta-llama/Llama-3.1-8B-Instruct",
    "mistralai/Ministral-3-8B-Instruct-2512", "Qwen/Qwen3.5-9B", "mistralai/Ministral-3-14B-Instruct-2512",
    "openai/gpt-oss-20b", "Qwen/Qwen3.8-27B", "Qwen/Qwen3.6-35B-A3B", "meta-llama/Llama-3.3-70B-Instruct",
)  # fmt: skip
LENGTHS = (1024, 2048, 4096, 8192)
#: One card for each size of memory.
CARDS = ("rtx-4060", "rtx-3060", "rtx-4060-ti-16gb", "rtx-4090", "rtx-5090", "rtx-a6000", "a100-80gb")
#: The settings that take the least device memory; the table of needs is planned with these.
FRUGAL = {
    "load_in_4bit": True, "activation_checkpointing": "offload", "optim": "adamw_8bit", "per_device_train_batch_size": 1,
    "packing": False, "lora_r": 16, "torch_compile": False,
}  # fmt: skip
#: The models of the tables with layer offloading, and their cards.
LARGE = (
    "meta-llama/Llama-3.1-8B-Instruct", "Qwen/Qwen3.5-9B", "mistralai/Ministral-3-14B-Instruct-2512", "Qwen/Qwen3.8-27B",
    "meta-llama/Llama-3.3-70B-Instruct",
)  # fmt: skip
SMALL_CARDS = CARDS[: CARDS.index("rtx-4090") + 1]
#: The shipped recipes whose models are larger than their cards.
OFFLOADING = ("14b-4060", "32b-3060", "70b-4090")
#: The newest models, as people type them, and the settings that their table is planned with.
NEWEST = (
    "qwen3.8:27b", "qwen3.6:27b", "Qwen/Qwen3.6-35B-A3B", "qwen3.5 2b", "qwen3.5-9b", "muse glimmer 30b",
    "unsloth/Nemotron-3-Nano-30B-A3B-GGUF", "ministral-3:3b", "ministral-3:14b", "granite4:micro", "granite 4 h tiny",
    "granite-4.0-h-small", "glm-4.7-flash", "LFM2.5-1.2B-Instruct", "lfm2.5-8b-a1b", "gemma-4-e4b-it", "gemma-4-12b-it",
    "gemma-4-31b-it", "gpt-oss:20b", "olmo-3-32b-think", "nemotron 3 super", "zai-org/GLM-5.3-Flash", "kimi-k2.5",
)  # fmt: skip
NEWEST_SETTINGS = ("gpu=rtx-4090", "max_length=2048")
#: The card of the table of needs; `_room` translates to the others.
REFERENCE_CARD = "rtx-4090"


def plan_of(recipe: str) -> str:
    """The output of `finetune plan RECIPE`; overrides may follow the name, and --why after them."""
    from finetune.cli.plan import show_plan

    output = io.StringIO()
    with contextlib.redirect_stdout(output), contextlib.redirect_stderr(io.StringIO()):
        name, *overrides = recipe.removesuffix(" --why").split()
        why = recipe.endswith(" --why")
        show_plan(name, overrides, model=None, data=None, gpu=None, free=None, why=why, as_json=False)
    lines = [line.rstrip() for line in output.getvalue().splitlines()]
    return "```console\n$ finetune plan {}\n{}\n```\n".format(recipe, "\n".join(lines).rstrip())


def recipe_row(name: str) -> list[str]:
    """A shipped recipe's row of the table: its plan, peak, verdict and speed."""
    from finetune.card import find_card
    from finetune.planner.planning import plan_recipe, without_rows
    from finetune.recipe import load_recipe

    recipe = load_recipe(name)
    plan = plan_recipe(recipe, find_card(recipe.gpu), without_rows)
    forecast, max_length = plan.forecast, plan.settings.max_length
    assert forecast is not None  # only a CPU plan has none
    chosen = next(row.plan for row in plan.alternatives if row.chosen)
    peak = f"{_gib(forecast.peak_bytes)} (at most {_gib(forecast.peak_high_bytes)}) of {_gib(plan.card.free_bytes)}"
    speed = f"{forecast.tokens_per_s:,.0f}" if forecast.tokens_per_s else "unknown"
    model = plan.settings.model_name_or_path.rpartition("/")[2]
    return [f"`{name}`", model, plan.card.name, f"{max_length:,}", chosen, peak, plan.verdict, speed]


def recipes() -> str:
    """The table of the shipped recipes for cards, with their plans."""
    from finetune.recipe import load_recipe, shipped_recipes

    names = [name for name in shipped_recipes() if load_recipe(name).gpu != "cpu"]
    columns = ("recipe", "model", "card", ">row", "plan", ">peak, GiB", "verdict", ">tokens/s, modelled")
    return markdown(columns, [recipe_row(name) for name in names])


def newest_row(typed: str) -> list[str]:
    """A model's row of the table of the newest: its plan and what that needs, or why there is none and the way on."""
    from finetune.card import find_card
    from finetune.cli.source import recipe_of
    from finetune.errors import RecipeError
    from finetune.planner.planning import plan_recipe, without_rows

    try:
        recipe = recipe_of(typed, list(NEWEST_SETTINGS))
        plan = plan_recipe(recipe, find_card(recipe.gpu), without_rows)
    except RecipeError as error:
        return [f"`{typed}`", "-", f"refused: {'; '.join(error.problems)}. {error.fix}", "-", "-"]
    forecast = plan.forecast
    assert forecast is not None  # only a CPU plan has none
    chosen = next(row.plan for row in plan.alternatives if row.chosen)
    speed = f"{forecast.tokens_per_s:,.0f}" if forecast.tokens_per_s else "unknown"
    model = plan.settings.model_name_or_path.rpartition("/")[2]
    return [f"`{typed}`", model, f"{plan.verdict}: {chosen}", _gib(forecast.peak_high_bytes), speed]


def newest() -> str:
    """The table of the newest models on one card."""
    columns = ("typed", "model", "plan", ">upper end, GiB", ">tokens/s, modelled")
    return markdown(columns, [newest_row(typed) for typed in NEWEST])


def _gib(size: int) -> str:
    return f"{size / GIB:.1f}"


def need_row(model: str, **more: object) -> list[str]:
    """Upper end of the forecast in GiB with the FRUGAL settings and `more`, for each length; rounded up."""
    from finetune.card.find import find_card
    from finetune.planner.planner import make_plan
    from finetune.recipe import recipe_from

    card = dataclasses.replace(find_card(REFERENCE_CARD), total_bytes=512 * GIB, free_bytes=512 * GIB)
    row = []
    for length in LENGTHS:
        recipe = recipe_from({"model_name_or_path": model, "dataset": "rows.jsonl", "max_length": length, **FRUGAL, **more})
        forecast = make_plan(recipe, card, None).forecast
        assert forecast is not None  # only a CPU plan has none
        row.append(f"{math.ceil(100 * forecast.peak_high_bytes / GIB) / 100:.2f}")
    return [model, *row]


def needs() -> str:
    """The table of needs."""
    return markdown(("model", *(f">{length:,}" for length in LENGTHS)), [need_row(model) for model in MODELS])


def needs_offloaded() -> str:
    """The same with all layers' weights in host memory, and the input embedding where the output layer does not share it."""
    from finetune.model.names import entries
    from finetune.planner.shape import shape_of
    from finetune.recipe import recipe_from

    rows = []
    for model in LARGE:
        recipe = recipe_from({"model_name_or_path": model, "dataset": "rows.jsonl"})
        shape = shape_of(entries()[model].config, recipe)
        away = {"layer_offloading": "cpu", "offloaded_layers": shape.layers, "offload_embeddings": shape.table > 0}
        rows.append(need_row(model, **away))
    return markdown(("model", *(f">{length:,}" for length in LENGTHS)), rows)


def offloading() -> str:
    """What the shipped recipes with layer offloading hold and move."""
    from finetune.card import find_card
    from finetune.planner.planning import plan_recipe, without_rows
    from finetune.recipe import load_recipe, shipped_recipes
    from finetune.units import format_seconds

    rows = []
    for name in shipped_recipes():
        recipe = load_recipe(name)
        plan = plan_recipe(recipe, find_card(recipe.gpu), without_rows) if name in OFFLOADING else None
        if plan is None or plan.layer_copies is None:
            continue
        copies = plan.layer_copies
        seconds = [
            f"{format_seconds(computing)} / {format_seconds(copying)}"
            for computing, copying in (
                (copies.forward_computing_s, copies.forward_copying_s),
                (copies.backward_computing_s, copies.backward_copying_s),
            )
        ]
        layers, micro = f"{copies.layers} of {copies.of_layers}", plan.settings.per_device_train_batch_size
        pinned, moved = _gib(copies.pinned_bytes), _gib(copies.moved_bytes_per_step)
        rows.append([f"`{name}`", layers, micro, pinned, moved, *seconds, format_seconds(copies.waiting_s)])
    columns = (
        "recipe", ">layers in host memory", ">micro-batch", ">host memory, GiB", ">moved a step, GiB",
        ">forward: arithmetic / copies", ">backward: arithmetic / copies", ">the card waits",
    )  # fmt: skip
    return markdown(columns, rows)


def fits(needs: str = "needs", on: tuple[str, ...] = CARDS) -> str:
    """The longest rows that fit for each model and card, from a table of needs on the page."""
    table = cells(block("docs/fits.md", needs))
    columns = [f">{card} ({_gib(_usable_bytes(card))})" for card in on]
    return markdown(("model", *columns), [[name, *(_longest(row, card) for card in on)] for name, *row in table])


def fits_offloaded() -> str:
    """The same with every layer's weights in host memory."""
    return fits("needs-offloaded", SMALL_CARDS)


def _longest(row: list[str], card: str) -> str:
    fitting = [length for length, gib in zip(LENGTHS, row, strict=True) if float(gib) * GIB <= _usable_bytes(card)]
    return f"{max(fitting):,}" if fitting else "-"


@functools.cache
def _usable_bytes(card: str) -> int:
    """Bytes that a forecast for REFERENCE_CARD may take on this card: free, less what its context and cuBLAS take more."""
    from finetune.card.find import find_card
    from finetune.memory.rules import cublas_workspace_bytes

    this, reference = find_card(card), find_card(REFERENCE_CARD)
    context = [(facts.context_bytes or 0) + facts.context_uncertainty_bytes for facts in (this, reference)]
    cublas = [2 * cublas_workspace_bytes(facts.capability or (8, 0)) for facts in (this, reference)]
    return this.free_bytes - (context[0] - context[1]) - (cublas[0] - cublas[1])


def fits_short(columns: tuple[str, ...] = ("card", ">free", "rows of 1,024 tokens", "2,048", "4,096"), none: str = "-") -> str:
    """The largest model that fits each card, from the table of needs on the page."""
    from finetune.card.find import find_card

    table = cells(block("docs/fits.md", "needs"))
    rows = []
    for card in CARDS:
        fitting = [[row[0] for row in table if float(row[1 + n]) * GIB <= _usable_bytes(card)] for n in range(3)]
        largest = [names[-1].rpartition("/")[2] if names else none for names in fitting]
        rows.append([card, f"{_gib(find_card(card).free_bytes)} GiB", *largest])
    return markdown(columns, rows)
