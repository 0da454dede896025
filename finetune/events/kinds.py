"""The kinds of events. Each field says what it is. Numbers carry their unit in the name; unknown is None, in the file null."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Annotated, Any, ClassVar

from pydantic import Field

#: Of the lines in events.jsonl. It is raised when a reader of this version would misunderstand them; new keys don't raise it.
VERSION = 1
#: A longer number is damage, and would be too large for a float.
Whole = Annotated[int, Field(ge=-(2**63), lt=2**63)]


@dataclass(frozen=True, kw_only=True)
class Event:
    """What all events have. `durable` ones are synced to disk."""

    kind: ClassVar[str]
    durable: ClassVar[bool] = False

    time_s: Annotated[float | None, "when, since 1970; the writer puts it in"] = None


@dataclass(frozen=True, kw_only=True)
class Memory:
    """Memory now, and at the peak since the step or phase began. What a machine doesn't measure is null."""

    allocated_bytes: Annotated[Whole | None, "in live tensors, as torch's allocator counts"] = None
    peak_allocated_bytes: Annotated[Whole | None, "the most of it"] = None
    reserved_bytes: Annotated[Whole | None, "held by torch's allocator"] = None
    peak_reserved_bytes: Annotated[Whole | None, "the most of it"] = None
    inactive_split_bytes: Annotated[Whole | None, "free pieces of blocks that are in use: fragmentation"] = None
    card_used_bytes: Annotated[Whole | None, "in use on the whole card, by all programs"] = None
    card_total_bytes: Annotated[Whole | None, "on the whole card"] = None
    other_processes_bytes: Annotated[Whole | None, "in use on the card by other programs"] = None
    process_rss_bytes: Annotated[Whole | None, "host memory of the training process"] = None
    process_peak_rss_bytes: Annotated[Whole | None, "the most of it since the process began"] = None


@dataclass(frozen=True, kw_only=True)
class State(Event):
    """The run is in another of its states: queued, starting, running, stopping, or how it ended."""

    kind: ClassVar[str] = "state"
    durable: ClassVar[bool] = True

    state: Annotated[str, "queued, starting, running, stopping, paused, finished, stopped, diverged or failed"]
    attempt: Annotated[Whole | None, "number of the attempt that starts, from 1"] = None
    message: Annotated[str, "why, and what to type next"] = ""
    exit_code: Annotated[Whole | None, "exit status of a run that ended"] = None


@dataclass(frozen=True, kw_only=True)
class Phase(Event, Memory):
    """A phase other than training has ended; the peaks are its own."""

    kind: ClassVar[str] = "phase"

    phase: Annotated[str, "load, evaluate or save"]
    step: Annotated[Whole | None, "optimizer steps done; null in load"] = None
    phase_s: Annotated[float | None, "how long it took"] = None


@dataclass(frozen=True, kw_only=True)
class Start(Event):
    """Training begins: how, and from which checkpoint. Every attempt has one."""

    kind: ClassVar[str] = "start"

    version: Annotated[Whole | None, "version of these lines; null in files from before there was one"] = None
    resumed_from: Annotated[str | None, "name of the checkpoint; null from the beginning"] = None
    step: Annotated[Whole, "optimizer steps done already"] = 0
    total_steps: Annotated[Whole | None, "optimizer steps of the whole run"] = None
    exact: Annotated[bool | None, "whether resuming gives the same bits as a run that was never stopped"] = None
    approximate_because: Annotated[tuple[str, ...], "why not, when it doesn't"] = ()
    versions: Annotated[dict[str, str], "of the packages that compute"] = field(default_factory=dict)
    trainable_parameters: Annotated[Whole | None, "numbers that are trained"] = None
    memory_is: Annotated[str | None, "what the memory fields are about: card or process"] = None


@dataclass(frozen=True, kw_only=True)
class Step(Event, Memory):
    """One optimizer step has ended; the peaks are its own."""

    kind: ClassVar[str] = "step"

    step: Annotated[Whole, "optimizer steps done, this one included"]
    total_steps: Annotated[Whole | None, "optimizer steps of the whole run"] = None
    epoch: Annotated[float | None, "passes over the rows, with their fraction"] = None
    loss: Annotated[float | None, "mean loss of the step's trained tokens"] = None
    learning_rate: Annotated[float | None, "of this step"] = None
    grad_norm: Annotated[float | None, "norm of the gradient before clipping"] = None
    token_accuracy: Annotated[float | None, "share of the trained tokens that were predicted"] = None
    supervised_tokens: Annotated[Whole | None, "tokens trained on"] = None
    real_tokens: Annotated[Whole | None, "tokens without padding"] = None
    padded_tokens: Annotated[Whole | None, "tokens with padding"] = None
    step_s: Annotated[float | None, "how long the step took"] = None
    tokens_per_s: Annotated[float | None, "real tokens per second"] = None
    temperature_c: Annotated[float | None, "temperature of the card"] = None
    power_w: Annotated[float | None, "power that the card draws"] = None


@dataclass(frozen=True, kw_only=True)
class Evaluation(Event):
    """The held-out rows were evaluated."""

    kind: ClassVar[str] = "eval"

    step: Annotated[Whole, "optimizer steps done"]
    eval_loss: Annotated[float | None, "mean loss of the held-out rows"] = None
    eval_s: Annotated[float | None, "how long it took"] = None
    eval_token_accuracy: Annotated[float | None, "share of the held-out rows' trained tokens that were predicted"] = None


@dataclass(frozen=True, kw_only=True)
class Checkpoint(Event):
    """A checkpoint is sealed: from here on a resume may use it."""

    kind: ClassVar[str] = "checkpoint"
    durable: ClassVar[bool] = True

    step: Annotated[Whole, "optimizer steps done"]
    path: Annotated[str | None, "its folder, in the run directory"] = None
    bytes: Annotated[Whole | None, "size of its files, in bytes"] = None
    save_s: Annotated[float | None, "how long training waited for it"] = None
    seal_s: Annotated[float | None, "how long hashing and syncing took, beside training"] = None


@dataclass(frozen=True, kw_only=True)
class ForecastCheck(Event):
    """Forecast against measured: after the first step, and for the highest of all steps when the run has finished."""

    kind: ClassVar[str] = "forecast"

    at: Annotated[str, "first step, or end"] = "first step"
    step: Annotated[Whole | None, "optimizer steps done"] = None
    predicted_allocated_bytes: Annotated[Whole | None, "forecast peak in live tensors"] = None
    measured_allocated_bytes: Annotated[Whole | None, "measured peak in live tensors"] = None
    allocated_error: Annotated[float | None, "measured over forecast, less one: 0.1 is 10 % more than forecast"] = None
    predicted_peak_bytes: Annotated[Whole | None, "forecast peak of the whole card"] = None
    measured_card_bytes: Annotated[Whole | None, "measured on the whole card, without other programs"] = None
    measured_reserved_bytes: Annotated[Whole | None, "measured peak of torch's allocator"] = None


@dataclass(frozen=True, kw_only=True)
class Sample(Event):
    """The model's answer to a held-out prompt."""

    kind: ClassVar[str] = "sample"

    step: Annotated[Whole, "optimizer steps done"]
    prompt: Annotated[str | None, "the prompt"] = None
    expected: Annotated[str | None, "the answer of the row"] = None
    answer: Annotated[str | None, "the model's answer"] = None


@dataclass(frozen=True, kw_only=True)
class RunWarning(Event):
    """Something that the user should know; the run goes on."""

    kind: ClassVar[str] = "warning"

    message: Annotated[str, "what, in words"]


@dataclass(frozen=True, kw_only=True)
class Retry(Event):
    """An attempt has failed and another one follows by itself."""

    kind: ClassVar[str] = "retry"
    durable: ClassVar[bool] = True

    attempt: Annotated[Whole | None, "number of the attempt that follows"] = None
    reason: Annotated[str, "why there is one"] = ""
    changes: Annotated[dict[str, Any], "settings that it changes, with their new values"] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class OutOfMemory(Event, Memory):
    """An attempt ran out of memory. A retry or the run's end follows."""

    kind: ClassVar[str] = "out_of_memory"

    phase: Annotated[str | None, "load, train, evaluate or save"] = None
    message: Annotated[str, "the error's own words"] = ""
    asked_bytes: Annotated[Whole | None, "what could not be allocated"] = None
    micro_batch: Annotated[Whole | None, "rows in memory at once"] = None
    max_length: Annotated[Whole | None, "longest row, in tokens"] = None
    forecast_allocated_bytes: Annotated[Whole | None, "forecast peak of the phase in live tensors"] = None
    largest_free_block_bytes: Annotated[Whole | None, "largest free block in what the allocator holds"] = None
    free_blocks: Annotated[Whole | None, "number of those blocks"] = None


@dataclass(frozen=True, kw_only=True)
class LossSpike(Event):
    """The opt-in watchdog ended an attempt."""

    kind: ClassVar[str] = "loss_spike"

    message: Annotated[str, "the loss, where, and what is usual"]
    learning_rate: Annotated[float | None, "of the attempt"] = None


@dataclass(frozen=True, kw_only=True)
class Unknown(Event):
    """An event of a later version, as it stands in the file."""

    kind: ClassVar[str] = "unknown"

    values: dict[str, Any]


#: The types by the `kind` that their lines have.
KINDS: dict[str, type[Event]] = {
    each.kind: each
    for each in (
        State, Phase, Start, Step, Evaluation, Checkpoint, ForecastCheck, Sample, RunWarning, Retry, OutOfMemory, LossSpike,
    )
}  # fmt: skip
