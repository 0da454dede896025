"""Out of memory explained: the error's message beside the plan's expectation."""

from types import SimpleNamespace

from finetune.events import Memory, OutOfMemory
from finetune.memory.forecast import PhaseForecast
from finetune.run.retry import explanation, out_of_memory_event
from finetune.units import GIB

MESSAGE = "CUDA out of memory. Tried to allocate 1.50 GiB. GPU 0 has a total capacity of 23.55 GiB of which 1 GiB is free."


def described(error, forecast, memory):
    """The event of this error in phase train."""
    settings = SimpleNamespace(per_device_train_batch_size=1, max_length=8)
    plan = SimpleNamespace(settings=settings, forecast=SimpleNamespace(of_phase=lambda _: forecast))
    return out_of_memory_event(error, "train", plan, memory)


def test_the_message_stands_beside_forecast_and_measured_peaks():
    forecast = PhaseForecast(20 * GIB, 21 * GIB, None)
    memory = Memory(peak_allocated_bytes=22 * GIB, peak_reserved_bytes=23 * GIB)
    event = described(RuntimeError(f"{MESSAGE}\nException raised from malloc"), forecast, memory)
    assert explanation(event) == (
        f"{MESSAGE} The plan expected at most 20.0 GiB allocated and 21.0 GiB reserved in phase train; "
        "at the failure: 22.0 GiB allocated and 23.0 GiB reserved."
    )


def test_an_error_without_text_is_named_by_its_type():
    event = described(MemoryError(), PhaseForecast(GIB, None, None), Memory())
    assert explanation(event) == "MemoryError. The plan expected at most 1.00 GiB allocated in phase train."
    assert explanation(OutOfMemory(phase="load", message=MESSAGE)) == MESSAGE
