"""A process's own peak of memory, memory that it frees, and garbage collection: in training as Python does by default."""

import json
import subprocess
import sys

import psutil
import pytest

from finetune.system import return_freed_memory

CODE = """
import gc, json
usual = gc.get_threshold()
from finetune.system import raise_gc_thresholds, restore_gc_thresholds
raise_gc_thresholds()
rarely = gc.get_threshold()
restore_gc_thresholds()
print(json.dumps([usual, rarely, gc.get_threshold(), gc.get_freeze_count()]))
gc.freeze()
"""


AT_EXIT = """
import atexit, gc, os, sys
from finetune.system import raise_gc_thresholds
atexit.register(os.write, 2, b"a leak report")
raise_gc_thresholds()
atexit.register(os.write, 2, b"a tracker's end")
try:
    import triton
except ImportError:
    sys.modules["triton"] = sys
gc.freeze()
sys.exit("an error")
"""


def test_training_collects_as_usual_and_triton_reports_nothing_after_the_last_exit_handler():
    process = subprocess.run([sys.executable, "-c", CODE], capture_output=True, text=True, check=True)
    usual, rarely, training, set_aside = json.loads(process.stdout)
    assert rarely[0] > usual[0] and training == usual and set_aside > 0
    process = subprocess.run([sys.executable, "-c", AT_EXIT], capture_output=True, text=True)
    assert process.stderr == "an error\na tracker's end"


LARGE_PARENT = """
import subprocess, sys
held = b"x" * 500_000_000
code = "from finetune.system import peak_rss_bytes; print(peak_rss_bytes())"
print(subprocess.check_output([sys.executable, "-c", code], text=True))
"""


def test_peak_memory_is_of_the_process_and_not_of_the_one_that_started_it():
    assert int(subprocess.check_output([sys.executable, "-c", LARGE_PARENT], text=True)) < 200_000_000


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="glibc keeps freed memory")
def test_freed_memory_goes_back_to_the_system():
    pieces = [b"x" * size for size in [60_000] * 500]
    last, own = pieces.pop(), psutil.Process()  # memory behind the others stays in use: glibc can't shorten its heap
    pieces.clear()
    before = own.memory_info().rss
    return_freed_memory()
    assert own.memory_info().rss < before - 20e6 and last
