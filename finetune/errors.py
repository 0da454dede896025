"""Errors that a user can act on: the problem with its value, and what to type. One exit code for each cause."""

from __future__ import annotations

import json
import re

#: What looks like a token of a hub or a cloud; errors show it masked.
SECRET = re.compile(r"\b(hf_[A-Za-z0-9]{20,}|sk-[\w-]{20,}|gh[pousr]_[A-Za-z0-9]{20,}|github_pat_\w{20,}|AKIA[A-Z0-9]{16})\b")

#: Exit codes of what ended well, of any other error, and of what SIGINT or SIGTERM stopped.
FINISHED, FAILED, STOPPED = 0, 1, (130, 143)


class FinetuneError(Exception):
    """A problem the user can act on; printed without a traceback.

    `problems`: all of them, one line each. `fix`: what to type. `exit_code`: the process's exit status; `cause`: what that
    means. `run_state`: of a run that it ends.
    """

    exit_code = FAILED
    cause = "internal error"
    run_state = "failed"
    title = "Something went wrong"

    def __init__(self, problems: str | list[str], fix: str = "") -> None:
        self.problems = [SECRET.sub("***", problem) for problem in ([problems] if isinstance(problems, str) else problems)]
        self.fix = SECRET.sub("***", fix)
        super().__init__("\n".join(self.problems + ([fix] if fix else [])))

    def as_json(self) -> dict:
        """The same content for `--json`: `{"error": kind, "problems": [...], "fix": str, "exit_code": int}`."""
        return {"error": type(self).__name__, "problems": self.problems, "fix": self.fix, "exit_code": self.exit_code}

    @staticmethod
    def from_json(values: dict) -> FinetuneError:
        """The error whose `as_json` these values are. Raises KeyError and TypeError for values of something else."""
        return globals().get(values["error"], FinetuneError)(values["problems"], values["fix"])

    @staticmethod
    def written_by(output: str) -> FinetuneError | None:
        """The error that another process wrote as JSON in the last line of its output; None for any other output."""
        try:
            return FinetuneError.from_json(json.loads(output.strip().splitlines()[-1]))
        except (ValueError, KeyError, IndexError, TypeError):
            return None


class RecipeError(FinetuneError):
    """The recipe, an override or the command's usage is wrong."""

    exit_code = 2
    cause = "recipe"
    title = "The recipe needs a change"


class CommandError(RecipeError):
    """A command can't be done: a run, a file or an option is wrong."""

    title = "This can't be done"


class ModelError(RecipeError):
    """The base model's folder, weights or tokenizer can't be read."""

    title = "The model can't be used"


class MachineError(RecipeError):
    """This machine lacks cards or a package that the recipe needs."""

    title = "This machine lacks something"


class NoCard(RecipeError):
    """The named or required card is not here, not in the catalogue, or can't train."""

    title = "There is no such card"


class HubError(FinetuneError):
    """The hub, or the network to it, failed."""

    title = "The hub can't be used now"


class PackagesError(RecipeError):
    """A package needed to forecast and train is missing, or its version is not supported."""

    title = "The installed packages need a change"


class DoesNotFit(FinetuneError):
    """The forecast says that the plan does not fit the card."""

    exit_code = 3
    cause = "card"
    title = "This will not fit"


class CardError(RecipeError):
    """The planned card can't be used: its driver, its memory, or the installed torch."""

    exit_code = 3
    cause = "card"
    title = "The card can't be used"


class DataError(FinetuneError):
    """The dataset can't be read, or a run would refuse rows of it (`on_bad_rows`, `excess_length`)."""

    exit_code = 4
    cause = "data"
    title = "The data needs a change"


class OutOfMemory(FinetuneError):
    """Memory ran out and no smaller plan is left to try."""

    exit_code = 5
    cause = "out of memory"
    title = "Out of memory"


class Diverged(FinetuneError):
    """Loss or gradients are no longer finite, or chosen answers have become unlikely."""

    exit_code = 6
    cause = "diverged"
    run_state = "diverged"
    title = "Training diverged"


class LossSpike(Diverged):
    """The loss spiked; the supervisor goes back to the last checkpoint. Never shown to the user as an error."""


class DiskFull(FinetuneError):
    """The disk is full, or a path can't be written."""

    exit_code = 7
    cause = "disk"
    run_state = "paused"
    title = "The disk needs attention"


def exit_code_causes() -> dict[int, str]:
    """What each exit code of an error means, lowest first, in a word or three; without the internal error's."""
    causes = {error.exit_code: error.cause for error in _kinds(FinetuneError)}
    return {code: causes[code] for code in sorted(causes) if code != FAILED}


def _kinds(error: type[FinetuneError]) -> list[type[FinetuneError]]:
    return [kind for direct in error.__subclasses__() for kind in (direct, *_kinds(direct))]
