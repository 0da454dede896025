"""The plan as a frozen value; docs/plan-json.md is generated from these types."""

from __future__ import annotations

import math
import os
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from enum import StrEnum
from pathlib import Path
from typing import Any

from finetune.card.card import Card
from finetune.errors import CommandError, DataError, DoesNotFit
from finetune.files import from_json, is_damaged, read_json, to_json
from finetune.memory.forecast import Forecast, RowShape
from finetune.settings import AUTO, Recipe, Settings, resolve
from finetune.settings.compatibility import Sizes
from finetune.units import format_bytes, format_seconds, gib

#: Version of plan.json, raised when a field is removed or changes its type.
VERSION = 4
#: Reason of a setting that the recipe decides.
AS_SET = "as the recipe sets it"
#: Lowest max_length that the planner chooses or suggests.
LEAST_LENGTH = 256


class Verdict(StrEnum):
    """Whether the plan fits its budget, and how slow it is."""

    FITS = "fits"
    SLOW = "fits, slow"
    VERY_SLOW = "fits, very slow"
    TIGHT = "tight"
    NO_FIT = "does not fit"
    UNKNOWN = "unknown"

    @property
    def fits(self) -> bool:
        return self.startswith("fits")

    @property
    def level(self) -> str:
        """Severity: `ok`, `warn`, `bad` or `unknown`."""
        return {Verdict.FITS: "ok", Verdict.NO_FIT: "bad", Verdict.UNKNOWN: "unknown"}.get(self, "warn")


#: The sentence of each verdict.
VERDICTS = {
    Verdict.FITS: "fits, with {size} to spare", Verdict.SLOW: "fits, slow: {layers} of layers in host memory",
    Verdict.VERY_SLOW: "fits, very slow: layers on disk, {moved} moved and {time} in each step",
    Verdict.TIGHT: "tight: {size} too big at the upper end", Verdict.NO_FIT: "does not fit: {size} too big",
    Verdict.UNKNOWN: "unknown: there is no forecast for {gpu}",
}  # fmt: skip


def verdict_of(forecast: Forecast, budget_bytes: int, offload_target: object = None) -> Verdict:
    """Judge by the upper end, then by the likely peak or a replay of the allocator."""
    if forecast.peak_high_bytes <= budget_bytes:
        slow_verdicts: dict[object, Verdict] = {"cpu": Verdict.SLOW, "nvme": Verdict.VERY_SLOW}
        return slow_verdicts.get(offload_target, Verdict.FITS)
    return Verdict.TIGHT if forecast.peak_bytes <= budget_bytes or forecast.at_limit else Verdict.NO_FIT


#: Most entries of `DataStatistics.most_trained`. In larger micro-batches, all tokens count as trained on.
MOST_ROWS = 256


@dataclass(frozen=True)
class DataStatistics:
    """Statistics of the tokenised rows. Lengths in tokens, after the recipe's handling of long rows."""

    rows: int
    eval_rows: int
    total_tokens: int
    trained_tokens: int
    lengths: tuple[int, ...] = ()  # sorted, one per row; empty: rows not read, max_length is assumed
    most_trained: tuple[int, ...] = ()  # the MOST_ROWS largest numbers of trained tokens in a row, descending
    densest_trained_share: float = 1.0  # largest share of trained tokens in a row
    eval_total_tokens: int = 0
    eval_longest: int = 0  # tokens of the longest held-out row
    eval_most_trained: tuple[int, ...] = ()  # as most_trained, of the held-out rows
    longest_mismatched: int = 0  # longest prompt plus longest answer; 0: unknown
    pictures: Sizes = ()  # width and height, of the row with most pixels, after max_pixels
    eval_pictures: Sizes = ()  # of the held-out row with most pixels
    picture_tokens: tuple[int, ...] = ()  # tokens of each of `pictures`

    @property
    def longest(self) -> int | None:
        return self.lengths[-1] if self.lengths else None

    @property
    def pictures_summary(self) -> str:
        """E.g. `2 images of 1,024 x 1,024, 1,024 tokens each`."""
        counts = Counter(zip(self.pictures, self.picture_tokens, strict=True))
        summaries = []
        for ((width, height), tokens), count in counts.items():
            images, suffix = (f"{count} images", " each") if count > 1 else ("1 image", "")
            summaries.append(f"{images} of {width:,} x {height:,}, {tokens:,} tokens{suffix}")
        return " and ".join(summaries)

    def row_shape(self, settings: Settings, tokens: int) -> RowShape:
        """Return the largest micro-batches, with `tokens` tokens in the longest row."""
        packed = settings.packing
        share = self.trained_share_of(settings.per_device_train_batch_size, tokens, packed=packed)
        eval_tokens, eval_share = tokens, share
        if self.eval_longest:
            eval_tokens = min(settings.max_length, self.eval_total_tokens if packed else self.eval_longest)
            if self.eval_most_trained and not packed:
                rows = min(settings.per_device_eval_batch_size, self.eval_rows)
                eval_share = _trained_share(self.eval_most_trained, self.eval_rows, rows, eval_tokens)
        eval_pictures = self.eval_pictures or self.pictures if self.pictures else ()
        held_out = RowShape(eval_tokens, eval_share, pictures=eval_pictures)
        mismatched = min(settings.max_length, self.longest_mismatched or 2 * tokens)
        return RowShape(tokens, share, mismatched, self.pictures, held_out)

    def trained_share_of(self, rows: int, tokens: int, *, packed: bool) -> float:
        """Return the largest share of `rows` x (`tokens` - 1) positions that count in the loss."""
        if packed or not self.most_trained:
            return self.densest_trained_share if self.lengths else 1.0
        return _trained_share(self.most_trained, self.rows, rows, tokens)


def _trained_share(most_trained: tuple[int, ...], all_rows: int, rows: int, tokens: int) -> float:
    # unknown for more rows than are listed; the first token is never predicted
    if len(most_trained) < min(rows, all_rows) or tokens < 2:
        return 1.0
    return sum(min(count, tokens - 1) for count in most_trained[:rows]) / (rows * (tokens - 1))


@dataclass(frozen=True)
class DataProblem:
    """Why a run would refuse the rows, and the fix. The plan uses the valid rows."""

    problems: tuple[str, ...]
    fix: str = ""


@dataclass(frozen=True)
class Choices:
    """A recipe and the values chosen for its `auto` settings, with reasons. Immutable, so attempts can't mix."""

    recipe: Recipe
    data: DataStatistics | None = None  # of the recipe's rows, where they were read
    values: Mapping[str, Any] = field(default_factory=dict)
    reasons: Mapping[str, str] = field(default_factory=dict)

    def is_set(self, name: str) -> bool:
        return getattr(self.recipe, name) != AUTO

    def value(self, name: str) -> Any:
        return getattr(self.recipe, name) if self.is_set(name) else self.values[name]

    def choose(self, name: str, value: Any, reason: str) -> Choices:
        """Resolve one setting, unless the recipe sets a value."""
        if self.is_set(name):
            return self.with_reason(name, AS_SET)
        return replace(self, values={**self.values, name: value}).with_reason(name, reason)

    def with_reason(self, name: str, reason: str) -> Choices:
        return replace(self, reasons={**self.reasons, name: reason})

    def only_auto(self, values: dict[str, Any]) -> dict[str, Any]:
        return {name: value for name, value in values.items() if not self.is_set(name)}

    def total_steps(self, micro: int) -> int | None:
        """Return the run's optimizer steps; None if the rows are unknown."""
        recipe, data = self.recipe, self.data
        if recipe.max_steps is not None:
            return recipe.max_steps
        if data is None or not data.rows:
            return None
        sequences = math.ceil(data.total_tokens / self.value("max_length")) if self.value("packing") else data.rows
        processes = recipe.launch.num_processes
        accumulation = self.value("effective_batch_size") // (processes * micro)
        micro_batches = math.ceil(math.ceil(sequences / processes) / micro)
        # the last, smaller batch of an epoch counts as a step
        return math.ceil(recipe.num_train_epochs * math.ceil(micro_batches / accumulation))

    def settings(self, **more: Any) -> Settings:
        """Return the complete settings. Raises ValueError for conflicting or missing values."""
        return resolve(Settings, self.recipe, {**self.values, **more})


@dataclass(frozen=True)
class Alternative:
    """A forecast strategy. `overrides` reproduce this plan; `differs` has the overrides that differ from the chosen plan."""

    plan: str
    peak_bytes: int
    peak_high_bytes: int
    step_s: float | None
    tokens_per_s: float | None
    verdict: Verdict
    overrides: str
    differs: str
    chosen: bool = False


@dataclass(frozen=True)
class Suggestion:
    """A change to the recipe that saves memory, and its cost. `peak_bytes`: the new upper end."""

    override: str
    saves_bytes: int
    peak_bytes: int
    cost: str


@dataclass(frozen=True)
class ResourceCheck:
    """Host memory or disk: bytes needed, bytes free (None: unknown), and whether they suffice."""

    what: str
    needs_bytes: int
    free_bytes: int | None
    enough: bool | None


@dataclass(frozen=True)
class LayerCopies:
    """Copies of layer offloading. `weight_bytes` of `layers` out of `of_layers` decoder layers are in `place`: `cpu` (host
    memory) or `nvme` (a file).

    `pinned_bytes`: pinned host memory of a step. `moved_bytes_per_step` are copied to the GPU at `copied_bytes_per_s`: assumed
    for the GPU's link and for a drive. Arithmetic and copies of a pass overlap; the GPU waits for `waiting_s`. Seconds: None
    where the GPU's rates are unknown.
    """

    place: str
    layers: int
    of_layers: int
    weight_bytes: int
    pinned_bytes: int
    moved_bytes_per_step: int
    copied_bytes_per_s: float
    forward_computing_s: float | None = None
    forward_copying_s: float | None = None
    backward_computing_s: float | None = None
    backward_copying_s: float | None = None
    waiting_s: float | None = None

    @property
    def computing_s(self) -> float | None:
        if self.forward_computing_s is None or self.backward_computing_s is None:
            return None
        return self.forward_computing_s + self.backward_computing_s

    @property
    def summary_per_token(self) -> str:
        return f"{format_bytes(self.weight_bytes)}: about {self.weight_bytes / self.copied_bytes_per_s:.1f} s"

    @property
    def generation_summary(self) -> str:
        return f"layer offloading: each token of an answer moves {self.summary_per_token}"

    @property
    def summary(self) -> str:
        """E.g. `moves 256 GiB a step behind 124 s of arithmetic`, and how long the GPU waits."""
        moved = f"moves {format_bytes(self.moved_bytes_per_step)} a step"
        if self.computing_s is None or self.waiting_s is None:
            return f"{moved}; how long the GPU waits is unknown"
        moved = f"{moved} behind {format_seconds(self.computing_s)} of arithmetic"
        return moved if self.waiting_s < 0.01 * self.computing_s else f"{moved}, and {format_seconds(self.waiting_s)} beyond"


@dataclass(frozen=True)
class Plan:
    """Settings, reasons, forecast and verdict. The same inputs give the same plan.

    `budget_bytes`: GPU memory that the run may use. `headroom_bytes`: budget less the forecast's upper end, negative if the
    plan does not fit. `modelled_step_s`: step time before correction by earlier runs, in arbitrary units if the GPU's rates are
    unknown. `checks`: host memory and disk. `data_problem`: why a run would refuse the rows. `layer_copies`: None without layer
    offloading. `cost`: None without price_per_hour. `base_folder`: absolute path of a local base model; `model_type` and
    `parameters` describe the base model.
    """

    settings: Settings
    reasons: Mapping[str, str]
    card: Card
    verdict: Verdict
    total_steps: int | None = None
    forecast: Forecast | None = None
    data: DataStatistics | None = None
    alternatives: tuple[Alternative, ...] = ()
    suggestions: tuple[Suggestion, ...] = ()
    budget_bytes: int | None = None
    headroom_bytes: int | None = None
    modelled_step_s: float | None = None
    checks: tuple[ResourceCheck, ...] = ()
    data_problem: DataProblem | None = None
    layer_copies: LayerCopies | None = None
    cost: float | None = None
    base_folder: str | None = None
    model_type: str | None = None
    parameters: int | None = None

    @property
    def exit_code(self) -> int:
        """Exit code of `finetune plan`: 4 for refused rows, 3 for a plan that does not fit or an unusable GPU, else 0."""
        if self.data_problem:
            return DataError.exit_code
        # the card's problem: torch can't use this machine's GPU
        return DoesNotFit.exit_code if self.verdict == Verdict.NO_FIT or self.card.problem else 0

    def as_json(self) -> dict[str, Any]:
        values: dict[str, Any] = to_json(self)
        settings = values.pop("settings")
        if values["data"]:  # without the fields that have an entry per row
            for name in ("lengths", "most_trained", "eval_most_trained"):
                del values["data"][name]
        return {"version": VERSION, "verdict": values["verdict"], "plan": settings, **values}

    @classmethod
    def from_json(cls, values: dict[str, Any]) -> Plan:
        """Read the output of `as_json`. Raises ValueError."""
        if values.get("version") != VERSION:
            raise ValueError(f"plan format {values.get('version')}; this version reads format {VERSION}")
        return from_json(cls, {**values, "settings": values.get("plan")})

    def verdict_sentence(self) -> tuple[str, dict[str, str]]:
        """Return the verdict's message template and the values to format it with."""
        copies, step_s = self.layer_copies, self.forecast.step_s if self.forecast else None
        return VERDICTS[self.verdict], {
            "size": gib(abs(self.headroom_bytes or 0)), "layers": gib(copies.weight_bytes if copies else 0),
            "moved": gib(copies.moved_bytes_per_step if copies else 0), "time": format_seconds(step_s), "gpu": self.card.name,
        }  # fmt: skip

    @property
    def usable_bytes(self) -> int:
        return self.card.free_bytes if self.budget_bytes is None else self.budget_bytes

    def with_note(self, *notes: str) -> Plan:
        if not self.forecast:
            return self
        return replace(self, forecast=replace(self.forecast, notes=(*self.forecast.notes, *filter(None, notes))))


def plan_was_edited(path: Path) -> bool:
    """Tell whether plan.json was edited."""
    try:
        return is_damaged(path.read_bytes())
    except OSError:
        return False


def read_plan(path: str | Path) -> Plan:
    """Read a plan from a run or from `finetune plan --json > FILE`. Raises a FinetuneError."""
    path = Path(path)
    try:
        plan = Plan.from_json(read_json(path, dict, may_be_edited=True))
    except (OSError, ValueError) as error:
        raise CommandError(
            f"{path} can't be read: {type(error).__name__}: {error}",
            f"Restore it, or start again: finetune run {path.with_name('recipe.yaml')}",
        ) from None
    if plan.base_folder is None:
        return plan
    recorded_path, run_path = Path(plan.base_folder), path.parent.absolute()
    as_given = Path(os.path.expanduser(plan.settings.model_name_or_path))  # noqa: PTH111 - keeps ~ of an unknown user
    # a local base model may have moved with its project
    folders = (recorded_path, as_given, *(folder / as_given for folder in (run_path, *run_path.parents)))
    base_path = next((folder.absolute() for folder in folders if (folder / "config.json").is_file()), None)
    if base_path == as_given.absolute():
        return plan
    return replace(plan, settings=plan.settings.model_copy(update={"model_name_or_path": str(base_path or recorded_path)}))


def as_overrides(values: dict[str, Any]) -> str:
    """Format settings as `key=value` overrides."""
    return " ".join(f"{name}={str(value).lower() if isinstance(value, bool) else value}" for name, value in values.items())
