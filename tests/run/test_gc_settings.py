"""A training process collects garbage as Python does by default, though its start does not."""

import json
import subprocess
import sys

CODE = """
import gc, json
usual = gc.get_threshold()
from finetune.gc_settings import raise_gc_thresholds, restore_gc_thresholds
raise_gc_thresholds()
rarely = gc.get_threshold()
restore_gc_thresholds()
print(json.dumps([usual, rarely, gc.get_threshold(), gc.get_freeze_count()]))
gc.freeze()
"""


AT_EXIT = """
import atexit, gc, os, sys
from finetune.gc_settings import raise_gc_thresholds
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


def test_training_collects_as_usual_and_what_was_there_before_is_set_aside():
    process = subprocess.run([sys.executable, "-c", CODE], capture_output=True, text=True, check=True)
    usual, rarely, training, set_aside = json.loads(process.stdout)
    assert rarely[0] > usual[0] and training == usual and set_aside > 0


def test_what_triton_reports_after_the_last_exit_handler_is_hidden_and_nothing_else():
    process = subprocess.run([sys.executable, "-c", AT_EXIT], capture_output=True, text=True)
    assert process.stderr == "an error\na tracker's end"
