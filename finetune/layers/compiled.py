"""Compiled decoder layers: the share of activations that they save, and what torch has compiled so far."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from finetune.compat.torch import set_activation_budget

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
        from torch._dynamo.utils import clear_compilation_metrics, counters, get_compilation_metrics

        graphs = get_compilation_metrics()
        clear_compilation_metrics()
        for graph in graphs:
            is_forward, reason = graph.is_forward is not False, (graph.recompile_reason or "").strip()
            self.graphs += is_forward
            self.recompiles += is_forward and not str(graph.compile_id).endswith("/0")
            self.compile_s += graph.entire_frame_compile_time_s or 0.0
            self.reasons += (reason,) if reason and reason not in self.reasons else ()
        self.graph_breaks = sum(counters["graph_break"].values())
        return bool(graphs)
