"""AdamW with fp32 master weights and moments in host memory."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable
from typing import Any

import torch
from torch.optim.adamw import adamw

from finetune.layers.host_memory import host_empty

_MOMENTS = ("exp_avg", "exp_avg_sq")


# Gradients are copied to the host in `step()`, not in backward, so clipping, gradient accumulation, loss scaling and
# schedules work as with any other optimizer. Host memory: 12 bytes of state per parameter, allocated at the first step, and a
# staging buffer in the weights' dtype, for gradients on their way to the host and weights on their way back.
class CpuAdamW(torch.optim.Optimizer):
    """AdamW by torch's fused CPU kernel; bit-identical to `torch.optim.AdamW` for fp32 weights."""

    def __init__(
        self, params: Iterable[Any], lr: float = 1e-3, betas: tuple[float, float] = (0.9, 0.999), eps: float = 1e-8,
        weight_decay: float = 0.0,
    ) -> None:  # fmt: skip
        super().__init__(params, {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay})
        self._staging: dict[torch.Tensor, torch.Tensor] = {}

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        groups = [(group, [p for p in group["params"] if p.grad is not None]) for group in self.param_groups]
        updated = [parameter for _, parameters in groups for parameter in parameters]
        for parameter in updated:
            self._staging_buffer(parameter).copy_(parameter.grad, non_blocking=True)
            if not self.state[parameter]:
                # fp32 masters, so that small updates of 16-bit adapters add up
                self.state[parameter] = {"step": _step_count(parameter), "master": _host_fp32(parameter).copy_(parameter)}
                self.state[parameter] |= {name: _host_fp32(parameter).zero_() for name in _MOMENTS}
        for device in {parameter.device for parameter in updated if parameter.is_cuda}:
            torch.cuda.current_stream(device).synchronize()  # until the gradients have arrived
        for group, parameters in groups:
            if parameters:
                self._update(group, parameters)
        for parameter in updated:
            parameter.copy_(self._staging_buffer(parameter).copy_(self.state[parameter]["master"]), non_blocking=True)

    @torch.no_grad()
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load a state into host memory, and set the weights to the master weights. Raises ValueError for other groups."""
        # torch would move the state to the weights' device and dtype
        super().load_state_dict({**state_dict, "state": {}})
        parameters = [parameter for group in self.param_groups for parameter in group["params"]]
        ids = [index for group in state_dict["param_groups"] for index in group["params"]]
        self.state = defaultdict(dict)
        for index, parameter in zip(ids, parameters, strict=True):
            saved = state_dict["state"].get(index)
            if saved:
                self.state[parameter] = {name: _host_fp32(parameter).copy_(saved[name]) for name in ("master", *_MOMENTS)}
                self.state[parameter]["step"] = _step_count(parameter).copy_(saved["step"])
                parameter.copy_(self.state[parameter]["master"])

    def _update(self, group: dict[str, Any], parameters: list[torch.Tensor]) -> None:
        states = [self.state[parameter] for parameter in parameters]
        beta1, beta2 = group["betas"]
        adamw(
            [state["master"] for state in states],
            [self._staging_buffer(parameter).float() for parameter in parameters],
            [state["exp_avg"] for state in states],
            [state["exp_avg_sq"] for state in states],
            [],
            [state["step"] for state in states],
            fused=True, amsgrad=False, maximize=False,
            beta1=beta1, beta2=beta2, lr=group["lr"], weight_decay=group["weight_decay"], eps=group["eps"],
        )  # fmt: skip

    def _staging_buffer(self, parameter: torch.Tensor) -> torch.Tensor:
        if parameter not in self._staging:
            self._staging[parameter] = host_empty(parameter, pinned=parameter.is_cuda)
        return self._staging[parameter]


def _host_fp32(like: torch.Tensor) -> torch.Tensor:
    return host_empty(like, torch.float32, pinned=like.is_cuda)


def _step_count(parameter: torch.Tensor) -> torch.Tensor:
    return _host_fp32(parameter.new_empty(())).zero_()
