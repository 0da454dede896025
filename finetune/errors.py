"""Errors that a user can act on."""

from __future__ import annotations

import json
import re

#: Tokens of hubs and clouds, which errors mask.
SECRET = re.compile(r"\b(hf_[A-Za-z0-9]{20,}|sk-[\w-]{20,}|gh[pousr]_[A-Za-z0-9]{20,}|github_pat_\w{20,}|AKIA[A-Z0-9]{16})\b")

#: Exit codes of success, of an internal error, and of a stop by SIGINT or SIGTERM.
FINISHED, FAILED, STOPPED = 0, 1, (130, 143)


class FinetuneError(Exception):
    """A problem with its fix, printed without a traceback."""

    exit_code = FAILED
    #: Meaning of the exit code, in a few words for `finetune --help`.
    cause = "internal error"
    #: State of a run that the error ends.
    run_state = "failed"
    title = "Something went wrong"

    def __init__(self, problems: str | list[str], fix: str = "") -> None:
        # one line each, all problems together: a user corrects a file in one go
        self.problems = [SECRET.sub("***", problem) for problem in ([problems] if isinstance(problems, str) else problems)]
        #: What to type.
        self.fix = SECRET.sub("***", fix)
        super().__init__("\n".join(self.problems + ([fix] if fix else [])))

    def as_json(self) -> dict:
        return {"error": type(self).__name__, "problems": self.problems, "fix": self.fix, "exit_code": self.exit_code}

    @staticmethod
    def from_json(values: dict) -> FinetuneError:
        """Return the error of an `as_json` object. Raises KeyError or TypeError."""
        return globals().get(values["error"], FinetuneError)(values["problems"], values["fix"])

    @staticmethod
    def written_by(output: str) -> FinetuneError | None:
        """Return the error that another process printed, or None."""
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
    """A command's run, file or option is wrong."""

    title = "This can't be done"


class ModelError(RecipeError):
    """The base model can't be read."""

    title = "The model can't be used"


class MachineError(RecipeError):
    """The machine lacks GPUs or a package."""

    title = "This machine lacks something"


class NoCard(RecipeError):
    """The GPU is missing, unknown or can't train."""

    title = "There is no such GPU"


class HubError(FinetuneError):
    """The hub or the network failed."""

    title = "The hub can't be used now"


class PackagesError(RecipeError):
    """A package is missing or unsupported."""

    title = "The installed packages need a change"


class DoesNotFit(FinetuneError):
    """The forecast says that the plan does not fit the GPU."""

    exit_code = 3
    cause = "GPU"
    title = "This will not fit"


class CardError(RecipeError):
    """The planned GPU can't be used: its driver, its memory, or the installed torch."""

    exit_code = 3
    cause = "GPU"
    title = "The GPU can't be used"


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


# no user sees it: the supervisor resumes from the last checkpoint
class LossSpike(Diverged):
    """The loss spiked."""


class DiskFull(FinetuneError):
    """The disk is full, or a path can't be written."""

    exit_code = 7
    cause = "disk"
    run_state = "paused"
    title = "The disk needs attention"


def exit_code_causes() -> dict[int, str]:
    """Return the cause of each exit code."""
    causes = {error.exit_code: error.cause for error in _kinds(FinetuneError)}
    # the help text names the internal error itself, and a class may inherit the code
    return {code: causes[code] for code in sorted(causes) if code != FAILED}


def _kinds(error: type[FinetuneError]) -> list[type[FinetuneError]]:
    return [kind for direct in error.__subclasses__() for kind in (direct, *_kinds(direct))]
