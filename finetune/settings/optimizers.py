"""Optimizers; finetune/model/techniques.py makes this project's own."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Optimizer:
    """An optimizer. Times are estimates, as in finetune/planner/speed.py."""

    #: On the GPU at the optimizer step, per trained fp32 parameter.
    state_bytes: float
    #: Factor on step time: how much faster the optimizer must be to be chosen; 1 for the simplest.
    price: float = 1.0
    #: Works on parameters sharded by FSDP or DeepSpeed.
    shards: bool = False
    #: Multiple of AdamW's learning rate, and the source of that factor.
    rate_factor: float = 1.0
    rate_source: str = ""
    #: Whether the planner may choose the optimizer; a recipe always may.
    planned: bool = True
    #: Whether states are hundreds of small tensors: a few layers don't show how such states grow with the depth.
    small_states: bool = False
    memory_bytes: float = 28.0  # AdamW reads and writes weight, gradient and two moments in fp32
    #: Bytes moved over PCIe per parameter.
    pcie_bytes: float = 0.0
    #: Seconds per tensor: kernel launches, synchronisation.
    tensor_s: float = 0.0
    #: Seconds per parameter on two CPU cores.
    cpu_s: float = 0.0
    #: Names in other tools.
    synonyms: tuple[str, ...] = ()


#: Seconds per tensor of bitsandbytes' synchronisation.
_BITSANDBYTES_S = 2e-5

OPTIMIZERS = {
    "adamw_torch_fused": Optimizer(8.0, shards=True),
    "adamw_torch": Optimizer(8.0, shards=True, planned=False, synonyms=("adamw_hf", "adamw")),
    "adamw_8bit": Optimizer(2.1, 1.02, tensor_s=_BITSANDBYTES_S, synonyms=("adamw_bnb_8bit",)),
    "paged_adamw_8bit": Optimizer(2.1, 1.04, tensor_s=2 * _BITSANDBYTES_S),
    "paged_adamw_32bit": Optimizer(8.0, 1.04, planned=False, tensor_s=2 * _BITSANDBYTES_S, synonyms=("paged_adamw",)),
    "lion_8bit": Optimizer(
        1.05, planned=False, tensor_s=_BITSANDBYTES_S, rate_factor=0.2, rate_source="Lion, arXiv 2302.06675",
    ),
    "adafactor": Optimizer(0.1, 1.10, small_states=True, memory_bytes=56.0, tensor_s=7.5e-5),  # 15 launches
    "adamw_cpu_offload": Optimizer(0.0, 1.06, memory_bytes=0.0, pcie_bytes=8.0, cpu_s=0.5e-9),
}  # fmt: skip
#: The usual choice, and the choice that saves memory.
FUSED, EIGHT_BIT = "adamw_torch_fused", "adamw_8bit"
