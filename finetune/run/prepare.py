"""Prepare a run: check GPU, data, plan and disk, then write the run directory."""

from __future__ import annotations

from dataclasses import dataclass, replace
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

from finetune.card import Card, find_card
from finetune.compat.triton import COMPILER_FIX, triton_problem
from finetune.distributed import machine_problems
from finetune.errors import CardError, DataError, DiskFull, DoesNotFit, MachineError
from finetune.files import existing_parent, free_disk_bytes, write_json, write_manifest
from finetune.model.configuration import resolve_model_path
from finetune.model.weights import check_weights
from finetune.planner.plan import Plan, Verdict
from finetune.planner.planning import RowsRead, encode_rows, plan_recipe, statistics_of
from finetune.planner.resources import check_layer_offloading
from finetune.recipe import write_recipe
from finetune.run.base_adapter import copy_base_adapter, require_usable_adapter
from finetune.run.directory import RunDirectory, create, register
from finetune.run.trackers import missing_trackers
from finetune.settings import Recipe
from finetune.units import Progress, format_bytes

if TYPE_CHECKING:
    from finetune.data.preparation import SelectedRows


@dataclass(frozen=True)
class Prepared:
    """A recipe ready to run, with its plan, tokenised data and tokenizer."""

    recipe: Recipe
    plan: Plan
    data: SelectedRows
    tokenizer: Any
    picture_processor: Any = None  # for examples with images


def prepare(recipe: Recipe, *, force: bool = False, progress: Progress = lambda _: None) -> Prepared:
    """Read and tokenise the data, and plan. Raises FinetuneError; `force` accepts a plan that does not fit."""
    # first: a missing GPU is an error before anything is loaded
    card = find_card(recipe.gpu, here=True, processes=recipe.launch.processes_here)
    _check_machine(recipe, card)
    selected: SelectedRows  # set by `read`, which the planner calls with a completed recipe

    def read(recipe: Recipe) -> RowsRead:
        nonlocal selected
        if (model := Path(resolve_model_path(recipe))).is_dir():
            check_weights(model)
        selected = encode_rows(recipe, progress).select(recipe, recipe.length_limit)
        # a plan only notes these problems
        selected.raise_problems()
        progress("planning")
        token_rows = selected.encoded.trained_embedding_rows
        return RowsRead(statistics_of(selected), trained_embedding_rows=token_rows)

    plan = plan_recipe(recipe, card, read)
    settings = plan.settings
    require_usable_adapter(settings)
    # `finetune run RUN/recipe.yaml` repeats the run
    resolved = {name: getattr(settings, name) for name in ("model_name_or_path", "adapter_name_or_path", "method")}
    changed = {name: value for name, value in resolved.items() if value != getattr(recipe, name)}
    recipe = recipe.model_copy(update=changed)
    longest = (plan.data.longest if plan.data else None) or 0
    planned_limit = settings.max_length if longest > settings.max_length else None  # cuts longer rows
    data = selected.encoded.select(recipe, recipe.length_limit or planned_limit)
    data.raise_problems()
    examples = len(data.lengths)
    if examples < settings.effective_batch_size and settings.max_steps is None:
        problem = f"{examples} examples are fewer than one batch of {settings.effective_batch_size}"
        raise DataError(problem, f"Add examples, or set effective_batch_size={max(1, examples)}.")
    if plan.verdict == Verdict.NO_FIT and not force:
        raise DoesNotFit(*_shortfall_and_fixes(plan))
    check_layer_offloading(plan)
    if not card.is_cpu and (problem := triton_problem()):
        plan = plan.with_note(f"{problem}: the run computes the loss without Triton's kernels, which is slower")
    encoder = selected.encoded.encoder
    return Prepared(recipe, plan, data, encoder.tokenizer, encoder.picture_processor if settings.vision else None)


def _check_machine(recipe: Recipe, card: Card) -> None:
    problems = [*machine_problems(recipe, on_cpu=card.is_cpu), *missing_trackers(recipe.report_to)]
    if recipe.attn_implementation == "flash_attention_2" and find_spec("flash_attn") is None:
        problems.append("attn_implementation flash_attention_2 needs the package flash-attn; leave it out, or install it")
    if problems:
        raise MachineError(problems)
    if recipe.torch_compile is True and not card.is_cpu and (problem := triton_problem()):
        raise CardError(f"torch_compile needs Triton: {problem}", f"{COMPILER_FIX}. Or set torch_compile=false.")


def create_run(prepared: Prepared) -> RunDirectory:
    """Create the run directory atomically. Raises DiskFull."""
    plan = prepared.plan
    path, needed_bytes = Path(plan.settings.output_dir), plan.forecast.disk_bytes if plan.forecast else 0
    if needed_bytes > (free_bytes := free_disk_bytes(path)):
        needed = f"the run needs {format_bytes(needed_bytes)} for checkpoints and the adapter"
        problem = f"{existing_parent(path)} has {format_bytes(free_bytes)} free, {needed}"
        raise DiskFull(problem, "Free some space, set output_dir to another disk, or lower save_total_limit.")
    run = create(path, lambda run: _write_run(run, prepared))
    register(run)
    return run


def _write_run(run: RunDirectory, prepared: Prepared) -> None:
    from finetune.compat.processors import save_processor
    from finetune.compat.transformers import quiet_libraries
    from finetune.data.preparation import questions_of
    from finetune.data.splits import pack
    from finetune.data.tokenizer import ProcessorLoader
    from finetune.data.tokens import Encoder

    quiet_libraries()
    settings, data = prepared.plan.settings, prepared.data
    run.recipe.write_text(write_recipe(prepared.recipe), encoding="utf-8")
    run.data.mkdir()
    train = pack(data.train, settings.max_length, settings.seed) if settings.packing else data.train
    train.save_to_disk(str(run.data / "train"))
    if data.eval is not None and len(data.eval):
        data.eval.save_to_disk(str(run.data / "eval"))
    held_out = data.eval_report and data.eval_report.as_json()
    write_json(run.data / "report.json", {**data.report.as_json(), "eval_report": held_out, "plain": data.is_plain})
    examples = [example for split in data.splits[1:] for example in split.examples]
    questions = questions_of(examples, Encoder(prepared.tokenizer, processor_loader=ProcessorLoader(settings)))
    write_json(run.data / "eval_examples.json", questions)
    (run.data / "fingerprint").write_text(data.fingerprint, encoding="utf-8")
    prepared.tokenizer.save_pretrained(str(run.data / "tokenizer"))
    if settings.vision:
        save_processor(prepared.picture_processor.processor, str(run.data / "tokenizer"))
    write_manifest(run.data, {})
    if settings.adapter_name_or_path is not None:
        copy_base_adapter(run, Path(settings.adapter_name_or_path))
    run.checkpoints.mkdir()
    base = Path(settings.model_name_or_path).expanduser()
    plan = replace(prepared.plan, base_folder=str(base.absolute()) if base.is_dir() else None)
    write_json(run.plan, plan.as_json(), checksum=True)


def _shortfall_and_fixes(plan: Plan) -> tuple[list[str], str]:
    forecast, card = plan.forecast, plan.card
    assert forecast is not None
    missing_bytes = forecast.peak_high_bytes - card.free_bytes
    largest = max(forecast.parts, key=forecast.parts.__getitem__)
    free = f"{card.name} has {format_bytes(card.free_bytes)} free: {format_bytes(missing_bytes)} short"
    largest_part = f"the largest part is {largest} ({format_bytes(forecast.parts[largest])})"
    problems = [f"the peak needs {format_bytes(forecast.peak_bytes)}, {free}; {largest_part}"]
    fixes = [f"{item.override}  (saves {format_bytes(item.saves_bytes)}; {item.cost})" for item in plan.suggestions[:5]]
    if not fixes:
        return problems, "To run anyway: --force."
    return problems, "\n  ".join(["What would make it fit:", *fixes]) + "\nOr run anyway: --force."
