"""Compiled decoder layers: the share of activations that they save, and what torch has compiled so far."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from finetune.compat.torch import graph_breaks, new_compilations, set_activation_budget

if TYPE_CHECKING:
    import torch


def compile_layers(layers: list[torch.nn.Module], budget: float) -> None:
    """Compile each layer separately; equal ones share their code. `budget`: share of the activations that they save.

    A second length of rows makes the code one for any length. The compiler's settings are those of the process.
    """
    set_activation_budget(budget)
    for layer in layers:
        layer.compile()


@dataclass
class Compilations:
    """What torch has compiled in this process, so far: graphs, those of them that were compiled again for other inputs, with
    the reasons, places where a layer's graph had to be broken, and seconds."""

    graphs: int = 0
    recompiles: int = 0
    graph_breaks: int = 0
    compile_s: float = 0.0
    reasons: tuple[str, ...] = ()

    def update(self) -> bool:
        """Add compilations since the last call; returns whether there are any."""
        new = new_compilations()
        for compilation in new:
            self.graphs += compilation.is_forward
            self.recompiles += compilation.is_recompile
            self.compile_s += compilation.seconds
            self.reasons += (compilation.reason,) if compilation.reason and compilation.reason not in self.reasons else ()
        self.graph_breaks = graph_breaks()
        return bool(new)
