"""Models with Mamba mixers are forecast with mamba-ssm and causal-conv1d, of which only the Python files are needed."""

import os
import subprocess
import sys
import tarfile

import pytest
from conftest import ROOT

pytestmark = pytest.mark.standin
PACKAGES = ("mamba-ssm", "causal-conv1d")
#: The extension modules of both, which nvcc compiles: the dry run calls none of their functions.
STUBS = ("selective_scan_cuda", "causal_conv1d_cuda")
CODE = """
from tiny_models import settings
from finetune.memory.depth import at_depth
from finetune.memory.forecast import Batch
from finetune.memory.simulate import simulate
from finetune.model.names import catalogue
from finetune.model.transformers_config import config_from

for name in ("ibm-granite/granite-4.0-h-micro", "tiiuae/Falcon-H1-3B-Instruct", "nvidia/NVIDIA-Nemotron-3-Nano-30B-A3B-BF16"):
    wanted = settings(attn_implementation="sdpa", activation_checkpointing=False)
    config = at_depth(config_from(catalogue()[name], wanted), 4)
    simulation = simulate(config, wanted, Batch(1, 2048, 2048), (8, 9))
    print(max(peak.total() for peak in simulation.peaks.values()), "PyTorch code" in " ".join(simulation.notes))
"""


@pytest.fixture
def packages(tmp_path):
    """A folder with the Python files of both packages, and empty modules in place of the compiled ones."""
    skips = {"MAMBA_SKIP_CUDA_BUILD": "TRUE", "CAUSAL_CONV1D_SKIP_CUDA_BUILD": "TRUE"}
    options = ["--no-deps", "--no-binary", ":all:", "--no-build-isolation", "--quiet", "-d", str(tmp_path)]
    command = [sys.executable, "-m", "pip", "download", *options, *PACKAGES]
    if subprocess.run(command, env={**os.environ, **skips}, check=False).returncode:
        pytest.skip("the packages' source can't be fetched")
    (folder := tmp_path / "site").mkdir()
    for source in tmp_path.glob("*.tar.gz"):
        with tarfile.open(source) as archive:
            archive.extractall(tmp_path, filter="data")
        for part in ("mamba_ssm", "causal_conv1d", f"{source.name.split('-')[0]}.egg-info"):
            for path in tmp_path.glob(f"*/{part}"):
                path.rename(folder / part)
    for stub in STUBS:
        (folder / f"{stub}.py").touch()
    return folder


def test_the_packages_kernels_are_forecast_without_a_compiler_of_cuda(standin, packages):
    def forecasts(*more):
        machine = standin()
        machine.environment["PYTHONPATH"] = os.pathsep.join(map(str, (ROOT, ROOT / "tests" / "memory", *more)))
        return [line.split() for line in machine.python(CODE).stdout.splitlines()]

    for (with_packages, falls_back), (without, falls_back_without) in zip(forecasts(packages), forecasts(), strict=True):
        assert (falls_back, falls_back_without) == ("False", "True") and int(with_packages) < int(without)
