"""Events: one JSON line each, the only channel from a run to the terminal, the page and the trackers.

One writer at a time, append-only, complete lines. A reader keeps a byte offset and tolerates an incomplete last line, unknown
kinds and keys, and missing keys. docs/events.md documents every kind.
"""

from finetune.events.file import EventReader, EventWriter, event_from, event_json, read_events
from finetune.events.kinds import (
    ENDED_STATES,
    KINDS,
    VERSION,
    Checkpoint,
    Compiled,
    Evaluation,
    Event,
    ForecastCheck,
    LossSpike,
    Memory,
    OutOfMemory,
    Phase,
    Result,
    Retry,
    RunWarning,
    Sample,
    Start,
    State,
    Step,
    Unknown,
)

__all__ = [
    "ENDED_STATES", "KINDS", "VERSION", "Checkpoint", "Compiled", "Evaluation", "Event", "EventReader", "EventWriter",
    "ForecastCheck", "LossSpike", "Memory", "OutOfMemory", "Phase", "Result", "Retry", "RunWarning", "Sample", "Start",
    "State", "Step", "Unknown", "event_from", "event_json", "read_events",
]  # fmt: skip
