"""The verdict of a plan as the page says it."""

from __future__ import annotations

from finetune.planner.plan import Plan, Verdict
from finetune.units import GIB, gib

from ..language import mark, tr

#: Verdicts in a word or two.
SHORT_VERDICTS = {
    Verdict.FITS: mark("Fits"), Verdict.AT_LIMIT: mark("At the limit"), Verdict.TIGHT: mark("May not fit"),
    Verdict.NO_FIT: mark("Too big"), Verdict.UNKNOWN: mark("Can't say"), Verdict.NOT_POSSIBLE: mark("Not possible"),
}  # fmt: skip
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
    if verdict == Verdict.NO_FIT and spare is not None:
        return tr("Too big by {size}", size=gib(-spare))
    return tr(SHORT_VERDICTS[verdict])
