"""Delta nets are planned in seconds at any length, with as many bytes; where a package can't be used a plan says why."""

import sys
import tomllib
from pathlib import Path
from types import ModuleType, SimpleNamespace

import pytest
import torch
from tiny_models import settings

from finetune.compat.torch import fake_tensor_mode
from finetune.compat.triton import _unless_fake
from finetune.doctor.probe import architecture_finding
from finetune.memory import fake_tensors
from finetune.memory.forecast import Batch
from finetune.memory.simulate import simulate
from finetune.model import hybrid
from finetune.model.names import catalogue
from finetune.model.transformers_config import config_from

ROOT = Path(__file__).resolve().parents[2]
#: Three delta nets and an attention of Qwen3.5-4B.
QWEN = {**catalogue()["Qwen/Qwen3.5-4B"]}
QWEN["text_config"] = {**QWEN["text_config"], "num_hidden_layers": 4}
ADA, HOPPER, TURING = (8, 9), (9, 0), (7, 5)


def simulated(tokens, rows=1, **more):
    wanted = settings(load_in_4bit=False, attn_implementation="sdpa", **more)
    return simulate(config_from(QWEN, wanted), wanted, Batch(rows, tokens, rows * tokens), ADA)


def highest(simulation):
    return max(peak.total() for peak in simulation.peaks.values())


@pytest.fixture
def installed(monkeypatch):
    """installed(name=version, ...): these packages, and nothing else, are installed."""

    def install(compiler="", **versions):
        monkeypatch.setattr(hybrid, "installed_version", lambda name: versions.get(name.replace("-", "_")))
        monkeypatch.setattr(hybrid, "triton_problem", lambda: compiler)
        hybrid.kernel_problem.cache_clear()

    yield install
    hybrid.kernel_problem.cache_clear()


@pytest.mark.parametrize(("rows", "tokens", "recomputed"), [(1, 1024, True), (2, 700, False)])
def test_a_few_chunks_take_as_many_bytes_as_all(monkeypatch, rows, tokens, recomputed):
    few = simulated(tokens, rows, activation_checkpointing=recomputed)
    monkeypatch.setattr(fake_tensors, "CHUNKS_RUN", sys.maxsize)
    every = simulated(tokens, rows, activation_checkpointing=recomputed)
    assert len(few.recording.events) < 0.75 * len(every.recording.events)
    assert highest(few) == highest(every)


def test_a_plan_of_long_rows_has_no_more_operators():
    short, long = (len(simulated(tokens).recording.events) for tokens in (1024, 8192))
    assert long < 1.05 * short


@pytest.mark.parametrize(
    ("packages", "capability", "reason"),
    [
        ({}, ADA, "fla-core is not installed"), ({"fla_core": "0.6.0", "triton": "3.7.1"}, HOPPER, ""),
        ({"fla_core": "0.6.0", "triton": "3.6.0"}, HOPPER, "stops on Hopper GPUs with Triton 3.6.0"),
        ({"fla_core": "0.6.0", "triton": "3.6.0"}, ADA, ""), ({"fla_core": "0.6.0"}, TURING, "bfloat16"),
        ({"fla_core": "0.6.0", "compiler": "no C compiler"}, ADA, "no C compiler"),
    ],
)  # fmt: skip
def test_a_plan_and_the_doctor_say_in_a_line_why_the_reference_is_taken(installed, packages, capability, reason):
    installed(**packages)
    notes = hybrid.kernel_fallback_notes("qwen3_5_text", capability)
    assert len(notes) == bool(reason) and all(reason in note and "457 MiB a layer" in note for note in notes)
    assert hybrid.falls_back_to_torch("fla", capability) == bool(reason)
    finding = architecture_finding(
        {"architectures": [f"sm_{capability[0]}{capability[1]}"]}, {"name": "", "capability": capability}
    )
    assert finding.what.endswith(*(notes or ["the kernels of fla-core"]))


def test_mamba_mixers_name_their_packages_and_the_dry_run_the_reference_with_the_extras_own_command(installed):
    installed()
    (note,) = hybrid.kernel_fallback_notes("granitemoehybrid", ADA)
    assert "mamba-ssm is not installed" in note and "causal-conv1d" in note
    assert hybrid.kernel_fallback_notes("llama", ADA) == hybrid.kernel_fallback_notes("qwen3_5", None) == ()
    assert any(hybrid.FLA.install_command in note for note in simulated(64).notes)
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    assert hybrid.FLA.install_command == f"pip install '{extras['hybrid'][0]}'"


def test_every_type_with_such_kernels_is_in_the_table_and_its_dry_run_has_the_device_that_it_asks_for(monkeypatch):
    import transformers.models

    asking = {
        path.stem.removeprefix("modeling_")
        for path in Path(transformers.models.__file__).parent.glob("*/modeling_*.py")
        if any(f'"{package}"' in path.read_text(encoding="utf-8") for package in ("fla", "mamba_ssm"))
    }
    assert asking and asking <= hybrid.PACKAGES.keys()
    monkeypatch.setitem(sys.modules, "mamba_ssm", ModuleType("mamba_ssm"))
    with fake_tensor_mode():
        device = torch.empty(1).device
        with torch.cuda.device(device.index):
            assert torch.cuda.get_device_properties(device).multi_processor_count > 0
        kernel = SimpleNamespace(configs=["a tile"])
        assert _unless_fake(None, kernel, (1,))(torch.empty(1)) is None and kernel.best_config == "a tile"
