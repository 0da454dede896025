"""From a recipe to its plan, or to the largest value of one setting that fits, for every caller."""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from operator import attrgetter
from typing import TYPE_CHECKING, Any

from finetune.errors import CommandError, DataError, FinetuneError, ModelError, RecipeError
from finetune.memory.cache import LIBRARIES
from finetune.memory.device_peak import make_forecast
from finetune.model.configuration import read_config, vocabulary_size
from finetune.model.names import entries
from finetune.planner.plan import MOST_ROWS, Choices, DataProblem, DataStatistics, Plan
from finetune.planner.planner import make_plan, plan_if_fits
from finetune.planner.resources import choose_budget
from finetune.planner.shape import ModelShape, shape_of
from finetune.planner.speed import Batches
from finetune.recipe import NO_DATASET
from finetune.recipe.complete import complete, complete_for_rows
from finetune.requirements import refuse_other_versions
from finetune.settings import AUTO, Recipe, resolved
from finetune.settings.base_formats import BITS_16, NF4, QUANTISED
from finetune.settings.compatibility import Sizes
from finetune.units import Progress, format_seconds

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import ArrayLike

    from finetune.card.card import Card
    from finetune.data.preparation import EncodedRows, SelectedRows
    from finetune.memory.forecast import Forecast

RowReader = Callable[[Recipe], "RowsRead"]
#: Seconds between progress reports, and until the first.
_REPORT_EVERY_S = 0.5
#: The planner never chooses a max_pixels below this: 256 x 256.
LEAST_PIXELS = 2**16
#: Step of the tried values, their limit, and its name; max_length goes up to 2**20 if the model's configuration has no limit.
RANGES: dict[str, tuple[int, Callable[[ModelShape], int], str]] = {
    "max_length": (256, lambda shape: shape.max_positions or 2**20, "the model's own limit"),
    "lora_r": (8, lambda shape: shape.hidden, "the model's width"),
    "per_device_train_batch_size": (1, lambda _: 512, "the largest that is tried"),
}
#: Least memory besides the weights: CUDA context and activations.
LEAST_OTHER_BYTES = 2**29


@dataclass(frozen=True)
class RowsRead:
    """Statistics of the rows, why a run would refuse them, and notes."""

    statistics: DataStatistics | None = None
    problem: DataProblem | None = None
    notes: tuple[str, ...] = ()
    #: First and end of the embedding rows of new tokens.
    trained_embedding_rows: Sequence[int] = ()

    @property
    def has_pictures(self) -> bool:
        return bool(self.statistics and self.statistics.pictures)


class RowProgress:
    """Report the count, rate and time left of tokenised rows."""

    def __init__(self, report: Callable[[str], None]) -> None:
        self._report_text = report
        self._started_s = self._reported_s = time.monotonic()

    def __call__(self, count: int, total: int | None) -> None:
        now_s = time.monotonic()
        if now_s - self._reported_s < _REPORT_EVERY_S:
            return
        self._reported_s = now_s
        rate = count / (now_s - self._started_s)
        message = f"tokenising rows: {count:,}{f' of {total:,}' if total else ''}, {rate:,.0f} per second"
        if total and count and total > count:
            message += f", {format_seconds((total - count) / rate)} left"
        self._report_text(message)


def plan_recipe(
    recipe: Recipe, card: Card, reader: RowReader, *, progress: Progress = lambda _: None, compare: bool = False
) -> Plan:
    """Plan a recipe for a GPU; `compare` forecasts other plans, too. Raises PackagesError and RecipeError."""
    recipe, model_note, reasons = _complete_recipe(recipe)
    rows = reader(recipe)  # after the cheaper checks
    recipe, row_reasons = complete_for_rows(recipe, rows.trained_embedding_rows, has_pictures=rows.has_pictures)
    reasons |= row_reasons

    def plan_for(recipe: Recipe, rows: RowsRead, reasons: dict[str, str]) -> Plan:
        plan = make_plan(recipe, card, rows.statistics, progress=progress, compare=compare)
        plan = plan.with_note(*rows.notes, _picture_note(plan), model_note)
        return replace(plan, reasons={**plan.reasons, **reasons}, data_problem=rows.problem)

    plan, statistics = plan_for(recipe, rows, reasons), rows.statistics
    if plan.verdict.fits or recipe.max_pixels != AUTO or not (statistics and statistics.pictures):
        return plan
    largest_pixels = max(width * height for width, height in statistics.pictures)
    # smaller images have fewer tokens, so they may fit where the full size does not
    for pixels in (largest_pixels // divisor for divisor in (2, 4, 8, 16)):
        if pixels < LEAST_PIXELS:
            break
        smaller = resolved(recipe, max_pixels=pixels)
        smaller_rows = reader(smaller)
        tokens = smaller_rows.statistics.picture_tokens if smaller_rows.statistics else ()
        if not tokens or sum(tokens) >= sum(statistics.picture_tokens):  # the model scales every image to one size
            break
        if plan_if_fits(smaller, card, smaller_rows.statistics):
            cost = f"{max(statistics.picture_tokens):,} tokens per image -> {max(tokens):,}, with less detail"
            reason = f"{cost}: full-size images do not fit here"
            return plan_for(smaller, smaller_rows, reasons | {"max_pixels": reason})
    reader(recipe)  # callers use the rows that were read last
    return plan


def _complete_recipe(recipe: Recipe) -> tuple[Recipe, str, dict[str, str]]:
    refuse_other_versions(LIBRARIES)
    if recipe.launch.num_machines > 1 and recipe.launch.main_process_ip == "127.0.0.1":
        raise RecipeError("launch.main_process_ip is 127.0.0.1, which other machines can't reach; set the address of machine 0")
    return complete(recipe)


def _picture_note(plan: Plan) -> str:
    if plan.data is None or not plan.data.picture_tokens:
        return ""
    tokens = min(plan.data.longest or plan.settings.max_length, plan.settings.max_length)
    rows = plan.settings.per_device_train_batch_size * plan.settings.gradient_accumulation_steps
    largest_step = f"the largest step has {rows:,} row(s) of {tokens:,} tokens, each with {plan.data.pictures_summary}"
    return f"{largest_step}; its time is a rough estimate"


def reforecast(plan: Plan, data: DataStatistics) -> Forecast:
    """Forecast a plan whose settings have changed, for these rows. Raises RecipeError."""
    settings = plan.settings
    rows = data.row_shape(settings, Batches(settings.max_length, settings.packing, data).longest)
    config, budget_bytes = read_config(settings), plan.budget_bytes
    return make_forecast(config, settings, plan.card, rows=rows, budget_bytes=budget_bytes, lengths=data.lengths)


def without_rows(_recipe: Recipe) -> RowsRead:
    """Assume rows of max_length."""
    return RowsRead()


def rows_with_pictures(pictures: Sizes) -> RowReader:
    """Assume rows of max_length with images of these sizes."""

    def read(recipe: Recipe) -> RowsRead:
        from finetune.memory.picture_prompt import picture_prompt

        prompt = picture_prompt(recipe, pictures)
        return RowsRead(DataStatistics(0, 0, 0, 0, pictures=prompt.sizes, picture_tokens=prompt.token_counts))

    return read


def read_rows(recipe: Recipe, encode: Callable[[Recipe], EncodedRows] | None = None, *, downloaded: bool = False) -> RowsRead:
    """Read the recipe's rows if they are on this machine; refused rows become `problem`."""
    from finetune.data.sources import is_local, require_path_or_id

    # `downloaded`: a hub dataset is on this machine, too
    paths = [recipe.dataset.path] if isinstance(recipe.dataset.path, str) else recipe.dataset.path
    missing = [path for path in paths if not downloaded and not is_local(path)]
    try:
        for path in missing:
            require_path_or_id(path)
        if missing:
            return RowsRead(notes=(f"planned for full rows of max_length: {', '.join(missing)} is not on this machine",))
        selected = (encode or encode_rows)(recipe).select(recipe, recipe.length_limit)
    except DataError as error:
        return RowsRead(problem=DataProblem(tuple(error.problems), error.fix))
    except RecipeError as error:  # the model's tokenizer is not on this machine, and a plan needs none
        reason = f"the rows were not read, because the model's tokenizer can't be: {error.problems[0]}"
        return RowsRead(notes=(f"planned for full rows of max_length; {reason}",))
    problem = None
    try:
        selected.raise_problems()
    except DataError as error:
        problem = DataProblem(tuple(error.problems), error.fix)
    statistics = statistics_of(selected) if len(selected.splits[0].lengths) else None
    token_rows = selected.encoded.trained_embedding_rows
    return RowsRead(statistics, problem, tuple(selected.notes), token_rows)


def encode_rows(recipe: Recipe, say: Progress = lambda _: None) -> EncodedRows:
    """Tokenise a completed recipe's rows."""
    say("reading the data")
    from finetune.data.preparation import encode
    from finetune.data.sources import sources_of
    from finetune.data.tokenizer import load_tokenizer, trained_embedding_rows

    sources = sources_of(recipe.dataset)
    with ThreadPoolExecutor(1) as pool:
        # `info` hashes large files, here while load_tokenizer imports libraries
        pool.map(attrgetter("info"), itertools.chain(*sources))
        tokenizer = load_tokenizer(recipe)
    rows = encode(recipe, tokenizer, sources=sources, progress=RowProgress(say))
    try:
        vocabulary = vocabulary_size(recipe)
    except ModelError:  # rows can be read without a model; the plan reports the error
        vocabulary = None
    highest_token = max(split.stored.highest_token() for split in rows.splits)
    rows.trained_embedding_rows = trained_embedding_rows(rows.encoder.tokenizer, recipe, vocabulary, highest_token)
    return rows


def statistics_of(selected: SelectedRows) -> DataStatistics:
    """Summarise the rows for the planner."""
    training = selected.splits[0]
    columns = (counts for split in selected.splits for counts in (split.lengths, split.trained_lengths))
    statistics = statistics_of_lengths(*columns)
    return replace(
        statistics, total_tokens=training.total_tokens, trained_tokens=training.trained_tokens,  # a row may have two sequences
        longest_mismatched=max(split.longest_mismatched() for split in selected.splits), **_picture_statistics(selected),
    )  # fmt: skip


def _picture_statistics(selected: SelectedRows) -> dict[str, Any]:
    if not any(split.stored.have_pictures for split in selected.splits):
        return {}
    processor = selected.encoded.encoder.picture_processor
    largest, *held_out = (split.largest_pictures(processor) for split in selected.splits)
    tokens = tuple(processor.token_count(*size) for size in largest)
    return {"pictures": largest, "eval_pictures": held_out[0] if held_out else (), "picture_tokens": tokens}


def statistics_of_lengths(
    lengths: ArrayLike, trained: ArrayLike, eval_lengths: ArrayLike = (), eval_trained: ArrayLike = ()
) -> DataStatistics:
    """Summarise rows with these token counts for the planner."""
    import numpy as np

    tokens, trained_tokens, eval_tokens, eval_trained_tokens = (
        np.asarray(counts, dtype=np.int64) for counts in (lengths, trained, eval_lengths, eval_trained)
    )
    return DataStatistics(
        len(tokens), len(eval_tokens), int(tokens.sum()), int(trained_tokens.sum()), tuple(np.sort(tokens).tolist()),
        most_trained=_largest_counts(trained_tokens), densest_trained_share=float((trained_tokens / tokens).max(initial=0.0)),
        eval_total_tokens=int(eval_tokens.sum()), eval_longest=int(eval_tokens.max(initial=0)),
        eval_most_trained=_largest_counts(eval_trained_tokens),
    )  # fmt: skip


def _largest_counts(counts: np.ndarray) -> tuple[int, ...]:
    return tuple(sorted(counts.tolist(), reverse=True)[:MOST_ROWS])


@dataclass(frozen=True)
class Largest:
    """The largest value of a setting that fits, with its plan."""

    setting: str
    #: The name of a catalogue model for setting `model`; 0 if no value fits, with the least value's plan.
    value: int | str
    #: The next value, which may not fit; None where `value` is the `limit`.
    too_large: int | str | None
    limit: str
    #: `key=value` texts that set the value.
    overrides: tuple[str, ...]
    plan: Plan

    @property
    def sentence(self) -> str:
        value, too_large = (f"{size:,}" if isinstance(size, int) else size for size in (self.value, self.too_large))
        if not self.value:
            return f"{self.setting}: {too_large} does not fit either"
        bound = self.limit if too_large is None else f"{too_large} may not fit"
        return f"{self.setting}: {value} at most ({bound})"


def plan_largest(recipe: Recipe, card: Card, reader: RowReader, setting: str, progress: Progress = lambda _: None) -> Largest:
    """Bisect for the largest value of a setting that fits. Raises PackagesError and RecipeError."""
    recipe, model_note, reasons = _complete_recipe(recipe)
    # max_length and model ignore the rows, except for their images
    rows = reader(recipe) if setting not in ("max_length", "model") or _may_have_pictures(recipe) else RowsRead()
    if setting == "model":
        if rows.has_pictures:
            raise RecipeError(
                "--largest model searches text models, but the rows have images",
                "Plan image-text models one by one: finetune plan MODEL --images WIDTHxHEIGHT",
            )
        return _plan_largest_model(recipe, card, progress)
    recipe, row_reasons = complete_for_rows(recipe, rows.trained_embedding_rows, has_pictures=rows.has_pictures)
    if setting not in RANGES:
        raise RecipeError(f"--largest {setting}: not searchable; choose {', '.join(RANGES)} or model", "Name one of these.")
    step, limit_of_shape, limit = RANGES[setting]
    data = rows.statistics
    if setting == "max_length" and data:  # without lengths, rows of max_length are assumed
        pictures = {name: getattr(data, name) for name in ("pictures", "eval_pictures", "picture_tokens")}
        data = DataStatistics(0, 0, 0, 0, **pictures) if data.pictures else None

    def changes(value: int) -> dict[str, Any]:
        if setting != "per_device_train_batch_size":
            return {setting: value}
        batch = value * recipe.launch.num_processes
        return {setting: value, "gradient_accumulation_steps": 1, "effective_batch_size": batch}

    # bisect multiples of `step`: a larger value never takes less memory
    most = limit_of_shape(shape_of(read_config(recipe), recipe)) // step
    plan, fitting, failing = None, 0, most + 1
    tried = most  # where the limit itself fits, one plan is the answer
    while failing - fitting > 1:
        progress(f"planning {setting}={tried * step:,}")
        if larger := plan_if_fits(resolved(recipe, **changes(tried * step)), card, data):
            plan, fitting = larger, tried
        else:
            failing = tried
        tried = (fitting + failing) // 2
    overrides = changes(fitting * step or step)
    plan = (plan or make_plan(resolved(recipe, **overrides), card, data)).with_note(*rows.notes, model_note)
    plan = replace(plan, reasons={**plan.reasons, **reasons, **row_reasons})
    too_large = failing * step if failing <= most else None
    texts = tuple(f"{name}={number}" for name, number in overrides.items())
    return Largest(setting, fitting * step, too_large, limit, texts, plan)


def _may_have_pictures(recipe: Recipe) -> bool:
    try:
        return recipe.dataset.path == NO_DATASET or "vision_config" in read_config(recipe)
    except ModelError:  # a search for a model does not need the recipe's model
        return False


def _plan_largest_model(recipe: Recipe, card: Card, progress: Progress) -> Largest:
    # auto would offload layers of ever larger models: offload only if the recipe says so
    changes = {"layer_offloading": False} if recipe.layer_offloading == AUTO else {}
    weights_budget = choose_budget(Choices(recipe), card)[1] - LEAST_OTHER_BYTES
    may_be_quantised = any(getattr(recipe, base_format.setting) is not False for base_format in QUANTISED)
    smallest_format = NF4 if may_be_quantised else BITS_16
    too_large = None
    for name, entry in sorted(entries().items(), key=lambda item: (-item[1].parameters, item[0])):
        if not entry.first or entry.parameters > weights_budget / (0.9 * smallest_format.weight_bytes):
            continue
        try:
            other = resolved(
                recipe, model_name_or_path=name, model_revision=None, trust_remote_code=False, chat_template=None, **changes
            )
            if changes and shape_of(read_config(other), other).weight_bytes(smallest_format) > weights_budget:
                continue
            progress(f"planning {name}")
            plan = plan_if_fits(other, card, None)  # no rows: another model has another tokenizer
        except (FinetuneError, ValueError):  # named layers that this model doesn't have, a row longer than its limit
            continue
        if plan is not None:
            overrides = (f"model_name_or_path={name}", *(f"{setting}=false" for setting in changes))
            return Largest("model", name, too_large, "the largest of the catalogue", overrides, plan)
        too_large = name
    raise CommandError("no model of the catalogue fits with this recipe", "Lower max_length, or the batch size.")
