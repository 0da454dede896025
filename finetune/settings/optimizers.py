"""The optimizers of a recipe's `optim`: a row for each, with the facts that validation, forecast and planner need.

Trainer makes them by their names; this project's own are in finetune/model/techniques.py.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Optimizer:
    """`state_bytes`: on the GPU, per trained fp32 parameter, at the optimizer step. `price`: factor on step time: how much
    faster it must be before it is chosen; 1 for the simplest. `shards`: works on parameters sharded by FSDP or DeepSpeed.

    Time of a step: bytes per parameter that the GPU's memory or PCIe moves, seconds per tensor (kernel launches,
    synchronisation) and per parameter on two CPU cores; estimates, as in finetune/planner/speed.py.
    """

    state_bytes: float
    price: float = 1.0
    shards: bool = False
    #: What its learning rate is of AdamW's, and who found that: a name.
    rate_factor: float = 1.0
    rate_source: str = ""
    #: Whether the planner chooses it; others have to be asked for.
    planned: bool = True
    #: Whether states are hundreds of small tensors, of which a few layers do not show how they grow with the depth.
    small_states: bool = False
    memory_bytes: float = 28.0  # AdamW reads and writes weight, gradient and two moments in fp32
    pcie_bytes: float = 0.0
    tensor_s: float = 0.0
    cpu_s: float = 0.0
    #: Other tools' names for it.
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
#: The usual choice, and the one to save memory with.
FUSED, EIGHT_BIT = "adamw_torch_fused", "adamw_8bit"
