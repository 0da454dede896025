"""Kernel packages of model types with delta nets or Mamba mixers."""

from __future__ import annotations

from functools import cache
from importlib.util import find_spec
from typing import NamedTuple

from packaging.specifiers import SpecifierSet

from finetune.compat.triton import COMPILER_FIX, triton_problem
from finetune.requirements import installed_version


class KernelPackage(NamedTuple):
    """A package with kernels for a layer of transformers."""

    name: str
    #: Cost of the PyTorch reference, which runs without the package.
    reference_cost: str
    install_command: str


# MiB: one layer, forward and backward, on the stand-in GPU. Speed: published comparisons (transformers#48718, unsloth-zoo#865).
FLA = KernelPackage(
    "fla-core", "about half the speed, 457 MiB a layer more (Qwen3.5-4B, 2,048 tokens)", "pip install 'fla-core>=0.6,<0.7'"
)
MAMBA = KernelPackage(
    "mamba-ssm", "997 MiB a mixer more (Granite 4 H micro, 2,048 tokens)",
    "pip install --no-build-isolation causal-conv1d mamba-ssm, which compiles them with nvcc",
)  # fmt: skip
_FLA_TYPES = "bailing_hybrid glm5_next kimi_linear lara_mini olmo_hybrid qwen3_5 qwen3_5_moe qwen3_next qwen4_exp"
_MAMBA_TYPES = "bamba falcon_h1 falcon_mamba granitemoehybrid jamba mamba mamba2 nemotron_h zamba zamba2"
#: Model type, without `_text` -> the package that its file in transformers gives to use_kernel_func_from_hub_with_fallback.
PACKAGES = {**dict.fromkeys(_FLA_TYPES.split(), FLA), **dict.fromkeys(_MAMBA_TYPES.split(), MAMBA)}
#: Linear layers that stay 16-bit, because other modules read or change their weights, by type of the language model.
_MAMBA_LAYERS = ("x_proj", "dt_proj", "out_proj")  # transformers' own code reads the second, its kernels all three
_READ_OUTSIDE = {
    "mamba": _MAMBA_LAYERS, "falcon_mamba": _MAMBA_LAYERS, "gemma3n_text": ("prediction_coefs", "correction_coefs"),
}  # fmt: skip
#: Layers whose weights transformers reads past an adapter in training; and layers whose weights mamba-ssm's kernels read.
_READ_PAST_ADAPTER = {**dict.fromkeys(("mamba", "falcon_mamba", "jamba"), ("dt_proj",)), "gemma3n_text": ("correction_coefs",)}
_READ_BY_KERNEL: dict[str, tuple[str, ...]] = {"mamba": _MAMBA_LAYERS, "falcon_mamba": _MAMBA_LAYERS}
_READ_BY_KERNEL |= dict.fromkeys(("mamba2", "falcon_h1", "nemotron_h", "granitemoehybrid", "bamba", "zamba2"), ("out_proj",))


@cache
def kernel_problem(package: KernelPackage, capability: tuple[int, int]) -> tuple[str, str] | None:
    """Return why a GPU takes the PyTorch reference, and the fix, or None."""
    if package is FLA and capability < (8, 0):
        return f"{package.name} has not been tried on GPUs without bfloat16", ""
    if installed_version(package.name) is None:
        return f"{package.name} is not installed on this machine", package.install_command
    if lacking := triton_problem():
        return f"{lacking} on this machine", COMPILER_FIX if installed_version("triton") else "pip install triton"
    # fla raises in the backward of a gated delta net (ops/common/chunk_o.py, fla#640)
    if package is FLA and capability[0] == 9 and (triton := installed_version("triton") or "0") in SpecifierSet(">=3.4,<3.7.1"):
        return f"{package.name} stops on Hopper GPUs with Triton {triton}", "pip install 'torch>=2.13'"
    return None


def falls_back_to_torch(import_name: str, capability: tuple[int, int] | None) -> bool:
    """Return whether a layer runs PyTorch code even if the kernel package can be imported."""
    return capability is None or (import_name == "fla" and kernel_problem(FLA, capability) is not None)


def kernel_fallback_notes(model_type: str, capability: tuple[int, int] | None) -> tuple[str, ...]:
    """Return a note if a model type runs PyTorch code instead of kernels."""
    package = PACKAGES.get(model_type.removesuffix("_text"))
    problem = kernel_problem(package, capability) if package and capability else None
    if package is None or problem is None:
        return ()
    reason, fix = problem
    note = f"PyTorch code instead of {package.name}'s kernels, as {reason}: {package.reference_cost}"
    return (f"{note}; {fix}" if fix else note,)


def layers_kept_in_16_bit(model_type: str) -> tuple[str, ...]:
    """Return the names of layers that stay 16-bit."""
    return _READ_OUTSIDE.get(model_type) or _read_by_kernel(model_type)


def layers_without_adapters(model_type: str) -> tuple[str, ...]:
    """Return the names of layers whose adapters would get no gradient."""
    return _READ_PAST_ADAPTER.get(model_type, ()) + _read_by_kernel(model_type)


def _read_by_kernel(model_type: str) -> tuple[str, ...]:
    return _READ_BY_KERNEL.get(model_type, ()) if find_spec("mamba_ssm") else ()
