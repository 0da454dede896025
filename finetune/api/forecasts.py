"""`fits`: the memory of a trainer's step on a GPU, before training. Imports torch after the GPU is found."""

from __future__ import annotations

import copy
import warnings
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from finetune.card import find_card
from finetune.card.card import expandable_segments
from finetune.errors import RecipeError
from finetune.memory.allocator_replay import replay
from finetune.memory.device_peak import forecast_of
from finetune.memory.ledger import DEFAULT_CAPABILITY, ledger_of
from finetune.planner.plan import Verdict, verdict_of
from finetune.units import format_bytes

if TYPE_CHECKING:
    from finetune.memory.forecast import Forecast


@dataclass(frozen=True)
class Fit:
    """Whether a training step fits a GPU: `if not finetune.fits(trainer): ...`."""

    gpu: str
    verdict: Verdict
    budget_bytes: int  # free memory of the GPU
    forecast: Forecast  # bytes by part and phase; lower end, likely value and upper end of the GPU's peak

    def __bool__(self) -> bool:
        return self.verdict.fits

    def __str__(self) -> str:
        forecast = self.forecast
        interval = f"{format_bytes(forecast.peak_low_bytes)} to {format_bytes(forecast.peak_high_bytes)}"
        budget = f"{format_bytes(self.budget_bytes)} on {self.gpu}"
        lines = [f"{self.verdict}: {format_bytes(forecast.peak_bytes)} ({interval}) of {budget}"]
        lines += [f"  {part:<12} {format_bytes(size):>10}" for part, size in forecast.parts.items() if size]
        return "\n".join([*lines, *(f"  {note}" for note in forecast.notes)])


def fits(trainer: Any, gpu: str | None = None) -> Fit:
    """Forecast a TRL or transformers trainer with its longest rows, without opening a GPU.

    `gpu`: None for this machine's, `cpu`, or a catalogue name (`finetune doctor` lists them). Raises a FinetuneError.
    """
    card = find_card(gpu or "auto")
    from finetune.api.trainer_step import largest_batch, simulate_trainer

    _refuse_what_is_not_simulated(trainer)
    # kernels and their workspaces depend on the compute capability
    capability = None if card.is_cpu else card.capability or DEFAULT_CAPABILITY
    with warnings.catch_warnings(action="ignore"):
        loader = copy.copy(trainer).get_train_dataloader()
        batch = largest_batch(loader.dataset, loader.collate_fn, trainer.args.per_device_train_batch_size)
        simulation = simulate_trainer(trainer, batch, capability)
    parameters = sum(parameter.numel() for parameter in trainer.model.parameters())
    ledger = ledger_of(simulation, capability, parameters=parameters, method="dry run of the trainer's own step")
    trace = None if card.is_cpu else simulation.trace()
    replayed = replay(trace, expandable=expandable_segments()) if trace else None
    # only a planned run packs all micro-batches to one length
    forecast = forecast_of(ledger, card, replayed, has_equal_rows=False)
    return Fit(card.name, verdict_of(forecast, card.free_bytes), card.free_bytes, forecast)


def _refuse_what_is_not_simulated(trainer: Any) -> None:
    args = trainer.args
    settings = {
        "activation_offloading": getattr(args, "activation_offloading", False), "torch_compile": args.torch_compile,
        "use_liger_kernel": args.use_liger_kernel, "fsdp": bool(args.fsdp), "deepspeed": bool(args.deepspeed),
        "auto_find_batch_size": args.auto_find_batch_size,
    }  # fmt: skip
    if names := [name for name, is_on in settings.items() if is_on]:
        raise RecipeError(
            f"can't forecast a trainer's step with {', '.join(names)}", "Turn it off, or plan a run: finetune plan RECIPE"
        )
