"""Planning needs little time and memory. CPU seconds are counted, so that a busy machine changes nothing."""

import json
import subprocess
import sys

import pytest

from finetune.units import GIB

PLAN = """
import json, resource, sys
from finetune.card import find_card
from finetune.planner.planner import make_plan
from finetune.recipe import parse_recipe
from finetune.system import peak_rss_bytes
recipe = parse_recipe(f"model_name_or_path: {sys.argv[1]}\\ndataset: d.jsonl\\n", "recipe", sys.argv[2:])
plan = make_plan(recipe, find_card("rtx-4090"), None)
used = resource.getrusage(resource.RUSAGE_SELF)
print(json.dumps({"verdict": plan.verdict, "plan": plan.as_json(), "processor_s": used.ru_utime + used.ru_stime,
                  "resident_bytes": peak_rss_bytes(), "torch": "torch" in sys.modules}))
"""


def planned(*arguments):
    process = subprocess.run([sys.executable, "-c", PLAN, *arguments], capture_output=True, text=True, check=True)
    return json.loads(process.stdout.splitlines()[-1])


@pytest.mark.slow
def test_an_8b_takes_15_seconds_at_first_and_no_torch_the_second_time():
    first = planned("Qwen/Qwen3-8B")
    assert first["verdict"] == "fits" and first["processor_s"] <= 15
    second = planned("Qwen/Qwen3-8B")
    assert second["plan"] == first["plan"]
    assert second["processor_s"] <= 2.5 and not second["torch"]


@pytest.mark.slow
def test_a_70b_is_planned_in_3_gib():
    answer = planned("meta-llama/Llama-3.3-70B-Instruct")
    assert answer["verdict"] == "fits, slow" and answer["plan"]["layer_copies"] and answer["resident_bytes"] <= 3 * GIB
