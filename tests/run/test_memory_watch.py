"""Warnings about memory: each once, and only when it applies."""

import subprocess
import sys

import psutil
import pytest

from finetune.events import Memory, Phase
from finetune.run.memory_watch import MemoryWatch
from finetune.system import return_freed_memory

GIB = 2**30
LARGE_PARENT = """
import subprocess, sys
held = b"x" * 500_000_000
code = "from finetune.system import peak_rss_bytes; print(peak_rss_bytes())"
print(subprocess.check_output([sys.executable, "-c", code], text=True))
"""


def test_peak_memory_is_of_the_process_and_not_of_the_one_that_started_it():
    assert int(subprocess.check_output([sys.executable, "-c", LARGE_PARENT], text=True)) < 200_000_000


def sample(**bytes_):
    return Memory(**{f"{name}_bytes": value for name, value in bytes_.items()})


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="glibc keeps freed memory")
def test_freed_memory_goes_back_to_the_system():
    pieces = [b"x" * size for size in [60_000] * 500]
    last, own = pieces.pop(), psutil.Process()  # memory behind the others stays in use: glibc can't shorten its heap
    pieces.clear()
    before = own.memory_info().rss
    return_freed_memory()
    assert own.memory_info().rss < before - 20e6 and last


def test_without_a_card_there_is_nothing_to_say():
    watch = MemoryWatch()
    assert watch.step(sample(process_rss=GIB), 1.0) == [] and watch.epoch(sample()) == []


def test_more_in_use_than_the_card_has_is_a_spill_and_reported_once():
    watch = MemoryWatch(may_spill=True)
    full = sample(reserved=9 * GIB, peak_allocated=9 * GIB, card_total=8 * GIB, other_processes=0)
    for _ in range(6):
        assert watch.step(sample(reserved=7 * GIB, peak_allocated=7 * GIB, card_total=8 * GIB, other_processes=0), 1.0) == []
    (warning,) = watch.step(full, 60.0)
    assert "spills" in warning and "60.0 s" in warning and "the median is 1.0 s" in warning
    assert watch.step(full, 60.0) == []


def test_without_windows_driver_a_full_card_is_no_spill():
    full = sample(reserved=9 * GIB, peak_allocated=9 * GIB, card_total=8 * GIB, other_processes=0)
    assert MemoryWatch().step(full, 60.0) == [] != MemoryWatch(may_spill=True).step(full, 60.0)


def test_another_program_that_takes_the_card_is_named_as_such():
    watch = MemoryWatch()
    watch.step(sample(other_processes=GIB), 1.0)
    assert watch.step(sample(other_processes=GIB + 2**20), 1.0) == []
    (warning,) = watch.step(sample(other_processes=3 * GIB), 1.0)
    assert "other programs use 2.00 GiB more" in warning


def test_fragmentation_is_a_warning_with_advice():
    (warning,) = MemoryWatch().step(sample(reserved=12 * GIB, peak_reserved=12 * GIB, peak_allocated=8 * GIB), 1.0)
    assert "4.00 GiB" in warning and "packing=true" in warning


@pytest.mark.parametrize("phase", [None, "evaluate"])
def test_what_an_earlier_step_or_phase_has_allocated_is_no_fragmentation_of_a_later_one(phase):
    watch, large = MemoryWatch(), {"peak_reserved_bytes": 12 * GIB, "peak_allocated_bytes": 11 * GIB}
    if phase:
        watch.observe(Phase(phase=phase, **large))
    else:
        assert watch.step(Memory(**large), 1.0) == []
    assert watch.step(sample(peak_reserved=12 * GIB, peak_allocated=8 * GIB), 1.0) == []
    assert "4.00 GiB of 15.0 GiB" in watch.step(sample(peak_reserved=15 * GIB, peak_allocated=8 * GIB), 1.0)[0]


@pytest.mark.parametrize(
    ("mib", "leaks"), [((0, 40, 80), 1), ((0, 0.001, 0.002), 0), ((0, 1024), 0), ((1024, 0, 2048), 0), ((0, 40, 80, 120), 1)]
)
def test_growth_over_three_epochs_is_a_leak_reported_once_and_noise_is_not(mib, leaks):
    watch = MemoryWatch()
    warnings = [text for level in mib for text in watch.epoch(sample(allocated=GIB + int(level * 2**20)))]
    assert len(warnings) == leaks and all("grown by 80 MiB over the last 3 epochs" in text for text in warnings)
