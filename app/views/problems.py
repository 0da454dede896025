"""Boxes with the problems and the fix of an error."""

from __future__ import annotations

from collections.abc import Sequence

from finetune.errors import FinetuneError, RecipeError

from ..language import tr, tr_n
from .markup import as_on_page, inert


def problem(title: str, problems: Sequence[str], fix: str = "") -> str:
    """Return a box that screen readers announce."""
    lines = "".join(f"<li>{inert(as_on_page(line))}</li>" for line in problems[:20])
    remedy = f'<p class="ft-fix">{inert(as_on_page(fix))}</p>' if fix else ""
    return f'<div class="ft-problem" role="alert"><strong>{inert(tr(title))}</strong><ul>{lines}</ul>{remedy}</div>'


def problem_of(error: Exception) -> str:
    """Return the box of any error."""
    if isinstance(error, FinetuneError):
        return problem(error.title, error.problems, error.fix)
    return problem(FinetuneError.title, [str(error)])


#: Errors in handling a message that the page never sends.
WRONG_MESSAGE = (ValueError, KeyError, IndexError, AttributeError, TypeError)


def refusal(error: Exception) -> str:
    """Return the box of an error in handling a message."""
    if isinstance(error, RecipeError):
        title = tr_n("{n} setting to correct", "{n} settings to correct", len(error.problems))
        return problem(title, error.problems, error.fix)
    # UnicodeError is a ValueError, but of a file's text
    if isinstance(error, WRONG_MESSAGE) and not isinstance(error, UnicodeError):
        return problem(tr("Not done"), [tr("the page sent what this server doesn't know")], tr("Reload the page."))
    return problem_of(error)
