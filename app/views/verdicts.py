"""The verdict of a plan as the page says it."""

from __future__ import annotations

from finetune.planner.plan import Plan, Verdict
from finetune.units import GIB, gib

from ..language import mark, tr

#: Less than this to spare is said to fit just.
_JUST_BYTES = 0.15 * GIB


def verdict_in_words(plan: Plan) -> str:
    """The verdict as a heading."""
    verdict, spare = plan.verdict, plan.headroom_bytes
    if verdict == Verdict.FITS and spare is not None:
        template = mark("Fits, just: {size} to spare") if spare < _JUST_BYTES else mark("Fits, with {size} to spare")
        return tr(template, size=gib(spare))
    if verdict == Verdict.AT_LIMIT:
        return tr("Fits, with allocator retries")
    if verdict == Verdict.TIGHT and spare is not None:
        return tr("May not fit: up to {size} too big", size=gib(-spare))
    if verdict == Verdict.NO_FIT:
        return tr("Too big by {size}", size=gib(-spare)) if spare is not None else tr("Too big")
    names = {Verdict.FITS: mark("Fits"), Verdict.TIGHT: mark("May not fit"), Verdict.NOT_POSSIBLE: mark("Not possible")}
    return tr(names.get(verdict, mark("Can't say")))
