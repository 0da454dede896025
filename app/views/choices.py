"""Chosen settings with their reasons, as HTML."""

from __future__ import annotations

import math

from finetune.planner.plan import AS_SET, Plan

from ..language import mark, tr, tr_n
from .markup import as_on_page, table
from .words import micro_batch, optimizer, precision, recomputation

#: Settings shown first: name, and the setting with the reason.
_FIRST = (
    (mark("Precision"), "load_in_4bit"), (mark("Gradient checkpointing"), "activation_checkpointing"),
    (mark("Micro-batch"), "per_device_train_batch_size"),
    (mark("Optimizer"), "optim"), (mark("Adapters"), "lora_r"), (mark("Learning rate"), "learning_rate"),
)  # fmt: skip


def chosen(plan: Plan) -> str:
    """Return six settings with their reasons, then all settings."""
    settings = plan.settings
    modules = settings.target_modules
    kinds = tr_n("{n} kind of layer", "{n} kinds of layer", len(modules)) if isinstance(modules, list) else str(modules)
    layers = tr("every linear layer") if modules == "all-linear" else kinds
    values = (
        precision(settings), recomputation(settings), micro_batch(settings), optimizer(settings),
        tr("rank {rank}, {layers}", rank=settings.lora_r, layers=layers),
        f"{settings.learning_rate:g}, {settings.lr_scheduler_type}",
    )  # fmt: skip
    columns = [tr("setting"), tr("value"), tr("reason")]
    rows = [[tr(name), value, _reason(plan.reasons.get(key, ""))] for (name, key), value in zip(_FIRST, values, strict=True)]
    first = table(columns, rows, tr("Chosen settings and reasons"), hidden_caption=True)
    every = [[name, _value(getattr(settings, name, None)), _reason(reason)] for name, reason in plan.reasons.items()]
    all_settings = table(columns, every, tr("All settings with reasons"), hidden_caption=True)
    summary = tr("All {n} settings", n=len(every))
    return f'{first}<details class="ft-details"><summary>{summary}</summary>{all_settings}</details>'


def _reason(reason: str) -> str:
    return tr("yours") if reason in ("", AS_SET) else as_on_page(reason)


def _value(value: object) -> str:
    if isinstance(value, float) and math.isfinite(value):
        return f"{value:g}"
    return str(value).lower() if isinstance(value, bool) else str(value)
