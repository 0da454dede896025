"""`fits` and `forecast`: the memory of a trainer's own step on a GPU, before it trains."""

from __future__ import annotations

import copy
import warnings
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from finetune.card import find_card
from finetune.card.allocator import expandable_segments
from finetune.errors import RecipeError
from finetune.memory.allocator_replay import replay
from finetune.memory.device_peak import forecast_of
from finetune.memory.ledger import USUAL_CAPABILITY, ledger_of
from finetune.planner.plan import Verdict, verdict_of
from finetune.units import format_bytes

if TYPE_CHECKING:
    from finetune.card.card import Card
    from finetune.memory.forecast import Forecast


@dataclass(frozen=True)
class Fit:
    """Whether a training step fits a GPU. True where it does: `if not finetune.fits(trainer): ...`.

    `budget_bytes`: free memory of `gpu`. `forecast`: peaks by part, phase and layer; lower end, likely peak and upper end.
    """

    gpu: str
    verdict: Verdict
    budget_bytes: int
    forecast: Forecast

    def __bool__(self) -> bool:
        return self.verdict.fits

    def __str__(self) -> str:
        forecast = self.forecast
        ends = f"{format_bytes(forecast.peak_low_bytes)} to {format_bytes(forecast.peak_high_bytes)}"
        budget = f"{format_bytes(self.budget_bytes)} on {self.gpu}"
        lines = [f"{self.verdict}: {format_bytes(forecast.peak_bytes)} ({ends}) of {budget}"]
        lines += [f"  {part:<12} {format_bytes(size):>10}" for part, size in forecast.parts.items() if size]
        return "\n".join([*lines, *(f"  {note}" for note in forecast.notes)])


def fits(trainer: Any, gpu: str | None = None) -> Fit:
    """Whether `trainer` (TRL's or transformers') can train its longest rows on `gpu`, by a dry run of the trainer's step.

    `gpu`: this machine's by default, `cpu`, or a name of the catalogue (`finetune doctor` lists them). Nothing of the trainer
    is changed and no GPU is opened. Raises a FinetuneError for an unknown GPU, or a step that needs the values of tensors.
    """
    card = find_card(gpu or "auto")
    forecast = forecast_trainer(trainer, card)
    return Fit(card.name, verdict_of(forecast, card.free_bytes), card.free_bytes, forecast)


def forecast(
    model: Any,
    args: Any,
    *,
    peft_config: Any = None,
    rows: int | None = None,
    tokens: int | None = None,
    gpu: str | None = None,
) -> Forecast:
    """The forecast of TRL's SFTTrainer for `model` with these `args` (SFTConfig), without a dataset.

    `model`: a transformers model or a PeftModel, with weights or on meta, or the name of a model whose configuration is read.
    `rows` (per_device_train_batch_size) of `tokens` (max_length) each. `gpu`: as for `fits`. Nothing that is given is changed.
    Raises a FinetuneError.
    """
    from finetune.api.trainer_step import sft_trainer

    tokens = tokens or args.max_length
    if not tokens:
        raise RecipeError("the length of the rows is not known: max_length is None", "Give tokens=.")
    card = find_card(gpu or "auto")
    trainer = sft_trainer(model, args, peft_config, tokens)
    return forecast_trainer(trainer, card, rows=rows, tokens=tokens)


def forecast_trainer(trainer: Any, card: Card, *, rows: int | None = None, tokens: int | None = None) -> Forecast:
    """The forecast of `trainer`'s step on `card`, with its longest rows, or `rows` of `tokens` each."""
    from finetune.api.trainer_step import largest_batch, simulate_trainer

    _refuse_what_is_not_simulated(trainer)
    capability = None if card.is_cpu else card.capability or USUAL_CAPABILITY
    rows = rows or trainer.args.per_device_train_batch_size
    with warnings.catch_warnings(action="ignore"):
        loader = copy.copy(trainer).get_train_dataloader()
        batch = largest_batch(loader.dataset, loader.collate_fn, rows, tokens)
        simulation = simulate_trainer(trainer, batch, capability)
    parameters = sum(parameter.numel() for parameter in trainer.model.parameters())
    run = ledger_of(simulation, capability, parameters=parameters, method="dry run of the trainer's own step")
    trace = None if card.is_cpu else simulation.trace()
    return forecast_of(run, card, replay(trace, expandable=expandable_segments()) if trace else None, even=False)


def _refuse_what_is_not_simulated(trainer: Any) -> None:
    """Raise RecipeError where the trainer would do something that its dry run does not."""
    args = trainer.args
    settings = {
        "activation_offloading": getattr(args, "activation_offloading", False), "torch_compile": args.torch_compile,
        "use_liger_kernel": args.use_liger_kernel, "fsdp": bool(args.fsdp), "deepspeed": bool(args.deepspeed),
        "auto_find_batch_size": args.auto_find_batch_size,
    }  # fmt: skip
    if names := [name for name, is_on in settings.items() if is_on]:
        raise RecipeError(
            f"a trainer's step with {', '.join(names)} is not forecast", "Turn it off, or plan a run: finetune plan RECIPE"
        )
