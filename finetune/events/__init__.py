"""Events: one JSON line each, the only channel between a run and those who watch it.

One writer at a time, append-only, whole lines; a reader keeps a byte offset and tolerates a torn last line, kinds and keys it
doesn't know, and missing ones. docs/events.md has the table of every kind.
"""

from finetune.events.file import EventReader, EventWriter, event_from, event_json, read_events
from finetune.events.kinds import (
    KINDS,
    VERSION,
    Checkpoint,
    Evaluation,
    Event,
    ForecastCheck,
    LossSpike,
    Memory,
    OutOfMemory,
    Phase,
    Retry,
    RunWarning,
    Sample,
    Start,
    State,
    Step,
    Unknown,
)

__all__ = [
    "KINDS", "VERSION", "Checkpoint", "Evaluation", "Event", "EventReader", "EventWriter", "ForecastCheck", "LossSpike",
    "Memory", "OutOfMemory", "Phase", "Retry", "RunWarning", "Sample", "Start", "State", "Step", "Unknown", "event_from",
    "event_json", "read_events",
]  # fmt: skip
