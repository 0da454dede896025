"""Events: JSON lines, the only channel from a run to terminal, page and trackers (docs/events.md)."""

# One writer at a time appends complete lines. A reader keeps a byte offset and tolerates an incomplete last line, unknown kinds
# and keys, and missing keys.

import dataclasses
import errno
import functools
import json
import os
import re
import stat
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any, ClassVar, NamedTuple, TypeVar, dataclass_transform, get_type_hints

from pydantic import Field

from finetune.files import from_json, is_damaged, parse_leniently, to_json, with_checksum
from finetune.system import one_writer_at_a_time

#: Version of events.jsonl, raised when a reader of this version would misunderstand the lines; new keys don't raise it.
VERSION = 1
#: States in which a run has ended: it continues only in a new attempt.
ENDED_STATES = ("paused", "finished", "diverged", "failed")
#: A number outside this range is damage, and could overflow a float.
Int64 = Annotated[int, Field(ge=-(2**63), lt=2**63)]
Int64OrNone = Int64 | None


@dataclass_transform(frozen_default=True, kw_only_default=True, field_specifiers=(field,))
@dataclass(frozen=True, kw_only=True)
class Event:
    """Base class of events."""

    kind: ClassVar[str]  # first key of the line
    durable: ClassVar[bool]  # whether the line is synced to disk

    time_s: Annotated[float | None, "time in seconds since 1970, set by the writer"] = None

    def __init_subclass__(cls, kind: str, durable: bool = False) -> None:
        cls.kind, cls.durable = kind, durable
        dataclass(frozen=True, kw_only=True)(cls)  # here: a subclass can't forget the decorator


@dataclass(frozen=True, kw_only=True)
class Memory:
    """Memory now, and at the peak since the start of the step or phase. Null where this machine can't measure it."""

    allocated_bytes: Annotated[Int64OrNone, "allocated by torch's allocator to live tensors"] = None
    peak_allocated_bytes: Annotated[Int64OrNone, "peak of allocated memory"] = None
    reserved_bytes: Annotated[Int64OrNone, "reserved by torch's allocator"] = None
    peak_reserved_bytes: Annotated[Int64OrNone, "peak of reserved memory"] = None
    inactive_split_bytes: Annotated[Int64OrNone, "free parts of split blocks: fragmentation"] = None
    segments: Annotated[Int64OrNone, "number of segments of reserved memory; null where expandable"] = None
    peak_segments: Annotated[Int64OrNone, "peak number of segments"] = None
    allocation_retries: Annotated[Int64OrNone, "how often torch has freed cached blocks to find memory so far"] = None
    card_used_bytes: Annotated[Int64OrNone, "in use on the whole GPU, by all programs"] = None
    card_total_bytes: Annotated[Int64OrNone, "total memory of the GPU"] = None
    other_processes_bytes: Annotated[Int64OrNone, "in use on the GPU by other programs"] = None
    process_rss_bytes: Annotated[Int64OrNone, "host memory of the training process"] = None
    process_peak_rss_bytes: Annotated[Int64OrNone, "peak host memory since the process started"] = None

    @property
    def own_card_bytes(self) -> int | None:
        # this process's GPU memory; unknown where the driver doesn't report other programs
        used, others = self.card_used_bytes, self.other_processes_bytes
        return None if used is None or others is None else used - others

    @property
    def context_bytes(self) -> int | None:
        own, reserved = self.own_card_bytes, self.reserved_bytes
        return None if own is None or reserved is None else own - reserved


class State(Event, kind="state", durable=True):
    """The run's state has changed."""

    state: Annotated[str, "queued, starting, running, pausing, paused, finished, diverged or failed"]
    attempt: Annotated[Int64OrNone, "number of the attempt that starts, from 1"] = None
    message: Annotated[str, "reason, and the next command"] = ""
    exit_code: Annotated[Int64OrNone, "exit status of a run that ended"] = None


class Phase(Event, Memory, kind="phase"):
    """A phase other than training has ended; its peaks are of this phase."""

    phase: Annotated[str, "load, evaluate or save"]
    step: Annotated[Int64OrNone, "optimizer steps done; null in load"] = None
    phase_s: Annotated[float | None, "duration"] = None


class Start(Event, kind="start"):
    """Training starts, from the beginning or a checkpoint. Every attempt has one."""

    version: Annotated[Int64OrNone, "version of these lines"] = None
    resumed_from: Annotated[str | None, "name of the checkpoint; null for a new run"] = None
    step: Annotated[Int64, "optimizer steps already done"] = 0
    total_steps: Annotated[Int64OrNone, "optimizer steps of the whole run"] = None
    eval_steps: Annotated[Int64OrNone, "optimizer steps from one evaluation to the next; null without evaluations"] = None
    exact: Annotated[bool | None, "whether the result is bit-exact, as if the run had never stopped"] = None
    approximate_because: Annotated[tuple[str, ...], "why the result is not bit-exact"] = ()
    versions: Annotated[dict[str, str], "versions of the libraries"] = field(default_factory=dict)
    trainable_parameters: Annotated[Int64OrNone, "number of trainable parameters"] = None
    memory_is: Annotated[str | None, "what the memory fields measure: card or process"] = None


class Chart(NamedTuple):
    """A chart of the run's page. `unit`: short, count, percent, °C or W, the formats of app/chart.js."""

    title: str
    unit: str = "short"


class Step(Event, Memory, kind="step"):
    """One optimizer step has ended; its peaks are of this step."""

    step: Annotated[Int64, "optimizer steps done, this one included"]
    total_steps: Annotated[Int64OrNone, "optimizer steps of the whole run"] = None
    epoch: Annotated[float | None, "epochs done, with fraction"] = None
    loss: Annotated[float | None, "mean loss of the step's supervised tokens"] = None
    learning_rate: Annotated[float | None, Chart("Learning rate"), "learning rate of this step"] = None
    grad_norm: Annotated[float | None, Chart("Gradient norm"), "norm of the gradient before clipping"] = None
    token_accuracy: Annotated[
        float | None, Chart("Token accuracy", "percent"), "share of the supervised tokens predicted correctly"
    ] = None
    supervised_tokens: Annotated[Int64OrNone, "tokens that count in the loss"] = None
    real_tokens: Annotated[Int64OrNone, "tokens without padding"] = None
    padded_tokens: Annotated[Int64OrNone, "tokens with padding"] = None
    metrics: Annotated[dict[str, float], "the method's metrics by TRL's names, such as rewards/margins of dpo"] = field(
        default_factory=dict
    )
    step_s: Annotated[float | None, "duration of the step"] = None
    tokens_per_s: Annotated[float | None, Chart("Tokens per second", "count"), "real tokens per second"] = None
    temperature_c: Annotated[float | None, Chart("Temperature", "°C"), "temperature of the GPU"] = None
    power_w: Annotated[float | None, Chart("Power", "W"), "power draw of the GPU"] = None


#: Charts by field of Step. The run's page and trackers show the fields with a Chart.
CHARTS = {
    name: annotation for name, hint in get_type_hints(Step, include_extras=True).items()
    for annotation in getattr(hint, "__metadata__", ()) if isinstance(annotation, Chart)
}  # fmt: skip


class Compiled(Event, kind="compiled"):
    """torch has compiled layers; the counts are of the whole attempt so far."""

    step: Annotated[Int64OrNone, "optimizer steps done"] = None
    graphs: Annotated[Int64OrNone, "forward graphs compiled"] = None
    recompiles: Annotated[Int64OrNone, "graphs compiled again for other inputs"] = None
    reasons: Annotated[tuple[str, ...], "reasons for compiling again"] = ()
    graph_breaks: Annotated[Int64OrNone, "how often a layer could not be compiled as one graph"] = None
    compile_s: Annotated[float | None, "seconds spent compiling"] = None


class Evaluation(Event, kind="eval"):
    """The held-out rows were evaluated."""

    step: Annotated[Int64, "optimizer steps done"]
    eval_loss: Annotated[float | None, "mean loss of the held-out rows"] = None
    eval_s: Annotated[float | None, "duration"] = None
    eval_token_accuracy: Annotated[float | None, "share of the held-out rows' supervised tokens predicted correctly"] = None
    metrics: Annotated[dict[str, float], "metrics of the training method on the held-out rows"] = field(default_factory=dict)


class Checkpoint(Event, kind="checkpoint", durable=True):
    """A checkpoint is sealed and can be resumed from."""

    step: Annotated[Int64, "optimizer steps done"]
    path: Annotated[str | None, "folder in the run directory"] = None
    bytes: Annotated[Int64OrNone, "size of its files"] = None
    save_s: Annotated[float | None, "how long saving blocked training"] = None
    seal_s: Annotated[float | None, "how long hashing and syncing took, in the background"] = None


class Result(Event, kind="result", durable=True):
    """The adapter is written, from the step with the lowest held-out loss or, without evaluations, from the last step."""

    step: Annotated[Int64, "optimizer steps that the adapter was trained for"]
    path: Annotated[str | None, "folder in the run directory"] = None
    eval_loss: Annotated[float | None, "held-out loss of the adapter"] = None
    last_step: Annotated[Int64OrNone, "optimizer steps done at the end of the run"] = None
    last_eval_loss: Annotated[float | None, "held-out loss of the last step, if the best step is earlier"] = None


class ForecastCheck(Event, kind="forecast"):
    """Forecast and measured memory, after the first two steps and, for the peak of all steps, at the end of the run."""

    at: Annotated[str, "first steps, or end"] = "first steps"
    step: Annotated[Int64OrNone, "optimizer steps done"] = None
    predicted_allocated_bytes: Annotated[Int64OrNone, "forecast peak of allocated memory"] = None
    measured_allocated_bytes: Annotated[Int64OrNone, "measured peak of allocated memory"] = None
    predicted_peak_bytes: Annotated[Int64OrNone, "forecast peak of the whole GPU, on a CPU of the process"] = None
    predicted_low_bytes: Annotated[Int64OrNone, "lower end of the forecast peak"] = None
    predicted_high_bytes: Annotated[Int64OrNone, "upper end of the forecast peak"] = None
    measured_card_bytes: Annotated[Int64OrNone, "on the whole GPU, without other programs; on a CPU of the process"] = None
    measured_reserved_bytes: Annotated[Int64OrNone, "measured peak of reserved memory"] = None
    predicted_reserved_bytes: Annotated[
        Int64OrNone, "forecast peak of reserved memory in training, by the replayed allocator"
    ] = None
    predicted_context_bytes: Annotated[Int64OrNone, "forecast CUDA context; null on a CPU"] = None
    measured_context_bytes: Annotated[Int64OrNone, "median CUDA context; null if the driver lists no memory by process"] = None
    predicted_other_processes_bytes: Annotated[Int64OrNone, "in use on the GPU when the run was planned; null on a CPU"] = None
    measured_other_processes_bytes: Annotated[
        Int64OrNone, "most in use by other programs after a step; null if the driver lists none"
    ] = None
    predicted_card_used_bytes: Annotated[Int64OrNone, "predicted_peak_bytes with other programs; null on a CPU"] = None
    measured_card_used_bytes: Annotated[Int64OrNone, "most in use on the whole GPU after a step, by NVML, all programs"] = None

    @property
    def measured_peak_bytes(self) -> int | None:
        if self.measured_reserved_bytes is None:  # on a CPU
            return self.measured_card_bytes
        # some drivers list no memory by process: then the context is the forecast's
        return self.measured_reserved_bytes + (self.measured_context_bytes or self.predicted_context_bytes or 0)


class Sample(Event, kind="sample"):
    """The model's answer to a held-out prompt."""

    step: Annotated[Int64, "optimizer steps done"]
    prompt: Annotated[str | None, "the prompt"] = None
    expected: Annotated[str | None, "the answer of the row"] = None
    answer: Annotated[str | None, "the model's answer"] = None
    pictures: Annotated[tuple[str, ...], "files of the prompt's images"] = ()


class RunWarning(Event, kind="warning"):
    """A warning for the user; the run continues."""

    message: Annotated[str, "the warning"]


class Retry(Event, kind="retry", durable=True):
    """An attempt has failed; the next attempt starts automatically."""

    attempt: Annotated[Int64OrNone, "number of the next attempt"] = None
    reason: Annotated[str, "reason for the retry"] = ""
    changes: Annotated[dict[str, Any], "changed settings with their new values"] = field(default_factory=dict)


class OutOfMemory(Event, Memory, kind="out_of_memory"):
    """An attempt ran out of memory. A retry or the run's end follows."""

    phase: Annotated[str | None, "load, train, evaluate or save"] = None
    message: Annotated[str, "the error's text"] = ""
    micro_batch: Annotated[Int64OrNone, "micro-batch size"] = None
    max_length: Annotated[Int64OrNone, "longest example in tokens"] = None
    forecast_allocated_bytes: Annotated[Int64OrNone, "forecast peak of the phase's allocated memory"] = None
    forecast_reserved_bytes: Annotated[Int64OrNone, "forecast peak of the phase's reserved memory"] = None


#: Event types by the `kind` of a line.
KINDS: dict[str, type[Event]] = {
    event.kind: event
    for event in (
        State, Phase, Start, Step, Compiled, Evaluation, Checkpoint, Result, ForecastCheck, Sample, RunWarning, Retry,
        OutOfMemory,
    )
}  # fmt: skip

_KindTypes = Mapping[str, type[Event]]
E = TypeVar("E", bound=Event)


class EventWriter:
    """Append events to a file, one JSON line each."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.listeners: list[Callable[[Event], None]] = []  # called with each event after it is written
        self._file = path.open("ab", buffering=0)
        self._write_lock = one_writer_at_a_time(path)
        with path.open("rb") as file:
            file.seek(max(0, os.fstat(file.fileno()).st_size - 1))
            self._ends_in_half_line = file.read(1) not in (b"", b"\n")  # of a killed writer

    def emit(self, event: Event) -> None:
        """Write an event, and pass it to the listeners. Raises OSError."""
        event = dataclasses.replace(event, time_s=round(time.time(), 3))
        line = with_checksum(json.dumps(event_json(event), allow_nan=False)).encode() + b"\n"
        if self._ends_in_half_line:
            line = b"\n" + line  # a reader skips the half line
        with self._write_lock:  # one write(): readers see only complete lines of a live writer
            written = self._file.write(line)
        if written != len(line):
            self._ends_in_half_line = self._ends_in_half_line or written > 0
            raise OSError(errno.ENOSPC, "the disk is full", str(self.path))
        self._ends_in_half_line = False
        if event.durable:
            os.fsync(self._file.fileno())
        for listener in self.listeners:
            listener(event)

    def warn(self, message: str) -> None:
        self.emit(RunWarning(message=message))

    def close(self) -> None:
        self._file.close()


class EventReader:
    """Read appended events from a byte offset."""

    def __init__(self, path: Path, offset: int = 0, kinds: _KindTypes = KINDS) -> None:
        self.path, self.offset, self._kinds = path, offset, kinds

    def new(self, max_bytes: int = 64 * 2**20) -> list[Event]:
        """Return the events appended since the last call."""
        try:
            if not stat.S_ISREG(self.path.stat().st_mode):  # a FIFO would wait for a writer
                return []
            with self.path.open("rb") as file:
                file.seek(self.offset)
                data = file.read(max_bytes)  # the next call reads on
        except FileNotFoundError:
            return []
        # a later call reads an incomplete last line, which may be half written
        complete_bytes = data.rfind(b"\n") + 1
        self.offset += complete_bytes
        events = (_parse_event(line, self._kinds) for line in data[:complete_bytes].splitlines())
        return [event for event in events if event is not None]


def read_events(path: Path, kinds: _KindTypes = KINDS) -> list[Event]:
    """Return all events of a file."""
    reader, events = EventReader(path, kinds=kinds), list[Event]()
    while new := reader.new():
        events += new
    return events


def newest(kind: type[E], events: Sequence[Event]) -> E | None:
    """Return the last event of a type, or None."""
    return next((event for event in reversed(events) if isinstance(event, kind)), None)


def event_json(event: Event) -> dict[str, Any]:
    """Return the JSON object of an event."""
    kind: Any = type(event)
    return {"kind": event.kind, **{name: to_json(getattr(event, name)) for name in _field_order(kind)}}


def event_from(values: dict[str, Any]) -> Event:
    """Return the event of a JSON object. Raises ValueError or KeyError."""
    return from_json(KINDS[values["kind"]], values)


@functools.cache
def _field_order(kind: Any) -> tuple[str, ...]:
    # time first, inherited fields last
    names = [field.name for field in dataclasses.fields(kind)]
    return tuple(sorted(names, key=lambda name: (name != "time_s", name not in kind.__annotations__)))


_KIND = re.compile(rb'\{"kind": "(\w+)"')  # the writer puts the kind first


def _parse_event(line: bytes, kinds: _KindTypes) -> Event | None:
    # a damaged line becomes a warning; a killed writer's half line and the kinds of a later version are skipped
    if is_damaged(line):
        message = "a line of events.jsonl has changed since it was written; it is skipped"
        return RunWarning(message=message) if RunWarning.kind in kinds else None
    match = _KIND.match(line)
    kind = kinds.get(match[1].decode()) if match else None
    return parse_leniently(kind, line) if kind is not None else None
