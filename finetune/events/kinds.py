"""The kinds of events, with a description of each field. Names have units; unknown is None, in the file null."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Annotated, Any, ClassVar

from pydantic import Field

#: Version of events.jsonl, raised when a reader of this version would misunderstand the lines; new keys don't raise it.
VERSION = 1
#: States of a run's last event, from which it needs a new attempt to go on.
ENDED_STATES = ("paused", "finished", "stopped", "diverged", "failed")
#: Larger numbers are damage, and too large for a float.
Whole = Annotated[int, Field(ge=-(2**63), lt=2**63)]


@dataclass(frozen=True, kw_only=True)
class Event:
    """Base of all events. `durable` ones are synced to disk."""

    kind: ClassVar[str]
    durable: ClassVar[bool] = False

    time_s: Annotated[float | None, "time in seconds since 1970, set by the writer"] = None


@dataclass(frozen=True, kw_only=True)
class Memory:
    """Memory now, and at the peak since the start of the step or phase. Null where this machine can't measure it."""

    allocated_bytes: Annotated[Whole | None, "allocated by torch's allocator to live tensors"] = None
    peak_allocated_bytes: Annotated[Whole | None, "peak of allocated memory"] = None
    reserved_bytes: Annotated[Whole | None, "reserved by torch's allocator"] = None
    peak_reserved_bytes: Annotated[Whole | None, "peak of reserved memory"] = None
    inactive_split_bytes: Annotated[Whole | None, "free parts of split blocks: fragmentation"] = None
    segments: Annotated[Whole | None, "number of segments, the pieces in which memory is reserved; null where expandable"] = (
        None
    )
    peak_segments: Annotated[Whole | None, "peak of their number"] = None
    allocation_retries: Annotated[Whole | None, "how often torch has freed cached blocks to find memory, so far"] = None
    card_used_bytes: Annotated[Whole | None, "in use on the whole GPU, by all programs"] = None
    card_total_bytes: Annotated[Whole | None, "of the whole GPU"] = None
    other_processes_bytes: Annotated[Whole | None, "in use on the GPU by other programs"] = None
    process_rss_bytes: Annotated[Whole | None, "host memory of the training process"] = None
    process_peak_rss_bytes: Annotated[Whole | None, "peak of it since the process started"] = None

    @property
    def own_card_bytes(self) -> int | None:
        """Bytes in use on the GPU without other programs; None where the driver does not report them."""
        used, others = self.card_used_bytes, self.other_processes_bytes
        return None if used is None or others is None else used - others

    @property
    def context_bytes(self) -> int | None:
        """Bytes of this process on the GPU outside torch's allocator; None where the driver does not report other programs."""
        own, reserved = self.own_card_bytes, self.reserved_bytes
        return None if own is None or reserved is None else own - reserved


@dataclass(frozen=True, kw_only=True)
class State(Event):
    """The run's state has changed."""

    kind: ClassVar[str] = "state"
    durable: ClassVar[bool] = True

    state: Annotated[str, "queued, starting, running, stopping, paused, finished, stopped, diverged or failed"]
    attempt: Annotated[Whole | None, "number of the starting attempt, from 1"] = None
    message: Annotated[str, "why, and what to type next"] = ""
    exit_code: Annotated[Whole | None, "exit status of a run that ended"] = None


@dataclass(frozen=True, kw_only=True)
class Phase(Event, Memory):
    """A phase other than training has ended; its peaks are of this phase."""

    kind: ClassVar[str] = "phase"

    phase: Annotated[str, "load, evaluate or save"]
    step: Annotated[Whole | None, "optimizer steps done; null in load"] = None
    phase_s: Annotated[float | None, "how long it took"] = None


@dataclass(frozen=True, kw_only=True)
class Start(Event):
    """Training starts, from the beginning or a checkpoint. Every attempt has one."""

    kind: ClassVar[str] = "start"

    version: Annotated[Whole | None, "version of these lines; null in files from before there was one"] = None
    resumed_from: Annotated[str | None, "name of the checkpoint; null for a new run"] = None
    step: Annotated[Whole, "optimizer steps done already"] = 0
    total_steps: Annotated[Whole | None, "optimizer steps of the whole run"] = None
    eval_steps: Annotated[Whole | None, "optimizer steps from one evaluation to the next; null without evaluations"] = None
    exact: Annotated[bool | None, "whether the result is bit-exact, as if the run was never stopped"] = None
    approximate_because: Annotated[tuple[str, ...], "why it is not exact"] = ()
    versions: Annotated[dict[str, str], "versions of the libraries"] = field(default_factory=dict)
    trainable_parameters: Annotated[Whole | None, "number of trainable parameters"] = None
    memory_is: Annotated[str | None, "what the memory fields measure: card or process"] = None


@dataclass(frozen=True, kw_only=True)
class Step(Event, Memory):
    """One optimizer step has ended; its peaks are of this step."""

    kind: ClassVar[str] = "step"

    step: Annotated[Whole, "optimizer steps done, this one included"]
    total_steps: Annotated[Whole | None, "optimizer steps of the whole run"] = None
    epoch: Annotated[float | None, "epochs done, with fraction"] = None
    loss: Annotated[float | None, "mean loss of the step's supervised tokens"] = None
    learning_rate: Annotated[float | None, "of this step"] = None
    grad_norm: Annotated[float | None, "norm of the gradient before clipping"] = None
    token_accuracy: Annotated[float | None, "share of the supervised tokens predicted correctly"] = None
    supervised_tokens: Annotated[Whole | None, "tokens that count in the loss"] = None
    real_tokens: Annotated[Whole | None, "tokens without padding"] = None
    padded_tokens: Annotated[Whole | None, "tokens with padding"] = None
    metrics: Annotated[dict[str, float], "of the training method, by TRL's names, such as rewards/margins of dpo"] = field(
        default_factory=dict
    )
    step_s: Annotated[float | None, "how long the step took"] = None
    tokens_per_s: Annotated[float | None, "real tokens per second"] = None
    temperature_c: Annotated[float | None, "temperature of the GPU"] = None
    power_w: Annotated[float | None, "power that the GPU draws"] = None


@dataclass(frozen=True, kw_only=True)
class Compiled(Event):
    """torch has compiled layers; the counts are of the whole attempt so far."""

    kind: ClassVar[str] = "compiled"

    step: Annotated[Whole | None, "optimizer steps done"] = None
    graphs: Annotated[Whole | None, "forward graphs compiled"] = None
    recompiles: Annotated[Whole | None, "graphs that were compiled again, for other inputs"] = None
    reasons: Annotated[tuple[str, ...], "why they were compiled again"] = ()
    graph_breaks: Annotated[Whole | None, "how often a layer could not be compiled as one graph"] = None
    compile_s: Annotated[float | None, "how long compiling has taken"] = None


@dataclass(frozen=True, kw_only=True)
class Evaluation(Event):
    """The held-out rows were evaluated."""

    kind: ClassVar[str] = "eval"

    step: Annotated[Whole, "optimizer steps done"]
    eval_loss: Annotated[float | None, "mean loss of the held-out rows"] = None
    eval_s: Annotated[float | None, "how long it took"] = None
    eval_token_accuracy: Annotated[float | None, "share of the held-out rows' supervised tokens predicted correctly"] = None
    metrics: Annotated[dict[str, float], "of the training method, of the held-out rows"] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class Checkpoint(Event):
    """A checkpoint is sealed and can be resumed from."""

    kind: ClassVar[str] = "checkpoint"
    durable: ClassVar[bool] = True

    step: Annotated[Whole, "optimizer steps done"]
    path: Annotated[str | None, "its folder, in the run directory"] = None
    bytes: Annotated[Whole | None, "size of its files, in bytes"] = None
    save_s: Annotated[float | None, "how long training was blocked"] = None
    seal_s: Annotated[float | None, "how long hashing and syncing took, in the background"] = None


@dataclass(frozen=True, kw_only=True)
class Result(Event):
    """The adapter is written: of the step with the lowest held-out loss or, without evaluations, of the last one."""

    kind: ClassVar[str] = "result"
    durable: ClassVar[bool] = True

    step: Annotated[Whole, "optimizer steps that the adapter was trained for"]
    path: Annotated[str | None, "its folder, in the run directory"] = None
    eval_loss: Annotated[float | None, "its held-out loss"] = None
    last_step: Annotated[Whole | None, "optimizer steps done at the end of the run"] = None
    last_path: Annotated[str | None, "folder of the last step's adapter; null when that is the best one"] = None
    last_eval_loss: Annotated[float | None, "held-out loss of the last step's adapter, when it is another"] = None


@dataclass(frozen=True, kw_only=True)
class ForecastCheck(Event):
    """Forecast against measured memory, after the first two steps and, for the peak of all steps, at the end of the run."""

    kind: ClassVar[str] = "forecast"

    at: Annotated[str, "first steps, or end"] = "first steps"
    step: Annotated[Whole | None, "optimizer steps done"] = None
    predicted_allocated_bytes: Annotated[Whole | None, "forecast peak of allocated memory"] = None
    measured_allocated_bytes: Annotated[Whole | None, "measured peak of allocated memory"] = None
    allocated_error: Annotated[float | None, "measured / forecast - 1: 0.1 is 10 % more than forecast"] = None
    predicted_peak_bytes: Annotated[Whole | None, "forecast peak of the whole GPU"] = None
    measured_card_bytes: Annotated[Whole | None, "measured on the whole GPU, without other programs"] = None
    measured_reserved_bytes: Annotated[Whole | None, "measured peak of reserved memory"] = None
    predicted_reserved_bytes: Annotated[
        Whole | None, "forecast peak of reserved memory in training, by the replayed allocator"
    ] = None
    reserved_error: Annotated[float | None, "measured / forecast - 1 of reserved memory"] = None
    predicted_segments: Annotated[Whole | None, "forecast number of segments in training; null where expandable"] = None
    measured_segments: Annotated[Whole | None, "measured number of segments; null where expandable"] = None


@dataclass(frozen=True, kw_only=True)
class Sample(Event):
    """The model's answer to a held-out prompt."""

    kind: ClassVar[str] = "sample"

    step: Annotated[Whole, "optimizer steps done"]
    prompt: Annotated[str | None, "the prompt"] = None
    expected: Annotated[str | None, "the answer of the row"] = None
    answer: Annotated[str | None, "the model's answer"] = None
    pictures: Annotated[tuple[str, ...], "files of the prompt's pictures"] = ()


@dataclass(frozen=True, kw_only=True)
class RunWarning(Event):
    """A warning for the user; the run continues."""

    kind: ClassVar[str] = "warning"

    message: Annotated[str, "the warning"]


@dataclass(frozen=True, kw_only=True)
class Retry(Event):
    """An attempt has failed and another one follows automatically."""

    kind: ClassVar[str] = "retry"
    durable: ClassVar[bool] = True

    attempt: Annotated[Whole | None, "number of the next attempt"] = None
    reason: Annotated[str, "why the run is retried"] = ""
    changes: Annotated[dict[str, Any], "changed settings, with their new values"] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class OutOfMemory(Event, Memory):
    """An attempt ran out of memory. A retry or the run's end follows."""

    kind: ClassVar[str] = "out_of_memory"

    phase: Annotated[str | None, "load, train, evaluate or save"] = None
    message: Annotated[str, "the error's text"] = ""
    asked_bytes: Annotated[Whole | None, "size of the allocation that failed"] = None
    micro_batch: Annotated[Whole | None, "micro-batch size"] = None
    max_length: Annotated[Whole | None, "longest row, in tokens"] = None
    forecast_allocated_bytes: Annotated[Whole | None, "forecast peak of the phase's allocated memory"] = None
    forecast_reserved_bytes: Annotated[Whole | None, "forecast peak of the phase's reserved memory"] = None
    room_bytes: Annotated[Whole | None, "how much more could be reserved, within the run's limit and free on the GPU"] = None
    free_bytes: Annotated[Whole | None, "free in reserved memory, all blocks together"] = None
    largest_free_block_bytes: Annotated[Whole | None, "largest free block in reserved memory"] = None
    largest_usable_block_bytes: Annotated[Whole | None, "largest free block that the failed allocation may use"] = None
    free_blocks: Annotated[Whole | None, "number of free blocks in reserved memory"] = None
    fragmented: Annotated[bool | None, "whether free memory would have sufficed in one piece"] = None
    holders: Annotated[dict[str, Whole], "what holds most of the allocated memory: line of code, or size, to bytes"] = field(
        default_factory=dict
    )


@dataclass(frozen=True, kw_only=True)
class LossSpike(Event):
    """The opt-in loss watchdog has ended an attempt."""

    kind: ClassVar[str] = "loss_spike"

    message: Annotated[str, "the loss, its step, and the recent median"]
    learning_rate: Annotated[float | None, "of the failed attempt"] = None


@dataclass(frozen=True, kw_only=True)
class Unknown(Event):
    """An event of a later version, unchanged."""

    kind: ClassVar[str] = "unknown"

    values: dict[str, Any]


#: `kind` of a line -> its type.
KINDS: dict[str, type[Event]] = {
    event.kind: event
    for event in (
        State, Phase, Start, Step, Compiled, Evaluation, Checkpoint, Result, ForecastCheck, Sample, RunWarning, Retry,
        OutOfMemory, LossSpike,
    )
}  # fmt: skip
