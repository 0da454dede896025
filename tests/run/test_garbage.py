"""A training process collects garbage as Python does by default, though its start does not."""

import json
import subprocess
import sys

CODE = """
import gc, json
usual = gc.get_threshold()
from finetune.garbage import collect_as_usual, collect_rarely, leave_all
collect_rarely()
rarely = gc.get_threshold()
collect_as_usual()
print(json.dumps([usual, rarely, gc.get_threshold(), gc.get_freeze_count()]))
leave_all()
"""


def test_training_collects_as_usual_and_what_was_there_before_is_set_aside():
    done = subprocess.run([sys.executable, "-c", CODE], capture_output=True, text=True, check=True)
    usual, rarely, training, set_aside = json.loads(done.stdout)
    assert rarely[0] > usual[0] and training == usual and set_aside > 0
