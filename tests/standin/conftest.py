"""Machines with stand-in GPUs (standin_gpu/): torch's CUDA build allocates there for real and computes nothing."""

import os
import sys
from pathlib import Path

import pytest
from warm import CLIENT

import finetune
from standin_gpu.machine import Machine, describe, read_catalogue

#: Folder of the stand-in libraries; `make test-card` sets it.
LIBRARIES = os.environ.get("STAND_IN_LIBRARIES", "")
CATALOGUE = read_catalogue(Path(finetune.__file__).parent / "card" / "cards.json")
ROOT = Path(finetune.__file__).parents[1]
#: The programs that tests name, as this checkout's; the first two start with the libraries imported, and write no trace.
PROGRAMS = {
    "finetune": [CLIENT, "-m", "finetune"], "warm python": [CLIENT],
    "cold finetune": [sys.executable, "-m", "finetune"], "python": [sys.executable],
}  # fmt: skip


class CheckoutMachine(Machine):
    """A machine on which `finetune` is this checkout's, run by the Python of the tests."""

    def __init__(self, *arguments):
        super().__init__(*arguments)
        self.environment["PYTHONPATH"] = str(ROOT)  # also for processes that a run starts without their working folder

    def run(self, program, *arguments, **options):
        return super().run(*PROGRAMS[program], *map(str, arguments), **options)

    def start(self, program, *arguments, **options):
        return super().start(*PROGRAMS[program], *map(str, arguments), **options)

    def python(self, code, *arguments, program="python", **options):
        return self.run(program, "-c", code, *arguments, **options)


@pytest.fixture
def standin(tmp_path_factory, warm_python):
    """standin("rtx-4090", total_gib=15.7) -> a machine with that GPU; several names for several GPUs, facts for all.

    `description`: the text of a machine's description in place of names; `driver` and `cuda`: versions of its driver.
    """

    def make(*gpus, description=None, driver="580.95.05", cuda=13000, **facts):
        changes = ",".join(f"{key}={value}" for key, value in facts.items())
        text = description or describe([f"{gpu}:{changes}" for gpu in gpus or ("rtx-4090",)], CATALOGUE, driver, cuda)
        return CheckoutMachine(Path(LIBRARIES), tmp_path_factory.mktemp("machine"), text)

    return make


@pytest.fixture
def six_layers(tmp_path):
    """A model of six layers and rows of uneven length, in the test's folder."""
    from benchmarks.card_cells import write_rows
    from finetune.bundled import model_path
    from finetune.model.names import catalogue
    from standin_gpu.sparse_model import write_sparse_model

    shape = {**catalogue()["Qwen/Qwen2.5-0.5B-Instruct"], "num_hidden_layers": 6, "vocab_size": 32000}
    write_sparse_model(tmp_path / "model", shape, model_path("tiny"))
    write_rows(tmp_path / "rows.jsonl", "uneven")
