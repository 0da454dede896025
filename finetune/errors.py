"""Errors that a user can act on; out-of-memory and full-disk errors of all libraries."""

from __future__ import annotations

import errno
import json
import re
from collections.abc import Iterator

#: Access tokens of hubs and clouds. Errors mask them.
SECRET = re.compile(r"\b(hf_[A-Za-z0-9]{20,}|sk-[\w-]{20,}|gh[pousr]_[A-Za-z0-9]{20,}|github_pat_\w{20,}|AKIA[A-Z0-9]{16})\b")

FINISHED, FAILED, STOPPED = 0, 1, (130, 143)  # exit codes of success, of an internal error, and of a stop by SIGINT or SIGTERM
#: Cause of each exit code but the internal error's, ascending.
CAUSES: dict[int, str] = {}


class FinetuneError(Exception):
    """A problem with its fix, printed without a traceback."""

    exit_code = FAILED
    #: Meaning of the exit code, in a few words for `finetune --help`.
    cause = "internal error"
    run_state = "failed"  # state of a run that the error ends
    title = "Something went wrong"

    def __init_subclass__(cls, **attributes: int | str) -> None:
        for name, value in attributes.items():
            setattr(cls, name, value)
        if cls.exit_code != FAILED:  # `finetune --help` describes the code of internal errors separately
            CAUSES[cls.exit_code] = cls.cause

    def __init__(self, problems: str | list[str], fix: str = "") -> None:
        # all problems together, one line each: a user corrects a file in one go
        self.problems = [SECRET.sub("***", problem) for problem in ([problems] if isinstance(problems, str) else problems)]
        self.fix = SECRET.sub("***", fix)  # what to type
        super().__init__("\n".join(self.problems + ([fix] if fix else [])))

    def as_json(self) -> dict:
        return {"error": type(self).__name__, "problems": self.problems, "fix": self.fix, "exit_code": self.exit_code}

    @staticmethod
    def from_json(values: dict) -> FinetuneError:
        """Return the error of an `as_json` object. Raises KeyError or TypeError."""
        return globals().get(values["error"], FinetuneError)(values["problems"], values["fix"])

    @staticmethod
    def from_output(output: str) -> FinetuneError | None:
        """Return the error that a process printed last, or None."""
        try:
            return FinetuneError.from_json(json.loads(output.strip().splitlines()[-1]))
        except (ValueError, KeyError, IndexError, TypeError):
            return None


class RecipeError(FinetuneError, exit_code=2, cause="recipe", title="The recipe needs a change"):
    """The recipe, an override or the command's usage is wrong."""


class CommandError(RecipeError, title="This can't be done"):
    """A command's run, file or option is wrong."""


class ModelError(RecipeError, title="The model can't be used"):
    """The base model can't be read."""


class MachineError(RecipeError, title="This machine lacks something"):
    """The machine lacks GPUs or a package."""


class NoCard(RecipeError, title="There is no such GPU"):
    """The GPU is missing, unknown or can't train."""


class HubError(FinetuneError, title="The hub can't be used now"):
    """The hub or the network failed."""


class PackagesError(RecipeError, title="The installed packages need a change"):
    """A package is missing or unsupported."""


class DoesNotFit(FinetuneError, exit_code=3, cause="GPU", title="This will not fit"):
    """The forecast says that the plan does not fit the GPU."""


class CardError(RecipeError, exit_code=3, cause="GPU", title="The GPU can't be used"):
    """The driver, the free memory or the installed torch prevents using the planned GPU."""


class DataError(FinetuneError, exit_code=4, cause="data", title="The data needs a change"):
    """The dataset can't be read, or a run would refuse some of its rows (`on_bad_rows`, `excess_length`)."""


class OutOfMemory(FinetuneError, exit_code=5, cause="out of memory", title="Out of memory"):
    """Memory ran out and no smaller plan is left to try."""


class Diverged(FinetuneError, exit_code=6, cause="diverged", run_state="diverged", title="Training diverged"):
    """Loss or gradients are not finite, or the chosen answers of DPO or KTO have become unlikely."""


class DiskFull(FinetuneError, exit_code=7, cause="disk", run_state="paused", title="The disk needs attention"):
    """The disk is full, or a path can't be written."""


#: Texts of torch's allocators, of the CUDA driver (without the final dot that transformers looks for), and of cuBLAS.
_MEMORY_TEXTS = (
    "out of memory", "CUBLAS_STATUS_ALLOC_FAILED", "can't allocate memory", "DefaultCPUAllocator: not enough memory",
)  # fmt: skip

_DISK_ERRNOS = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EROFS)
#: safetensors and torch's zip writer turn the errno into text of their own exceptions.
_DISK_TEXTS = (
    "No space left on device", "os error 28", "Disk quota exceeded", "File too large", "os error 27", "Read-only file system",
    "os error 30", "PytorchStreamWriter failed writing file", "] . unexpected pos ",
)  # fmt: skip


def is_out_of_memory(error: BaseException) -> bool:
    """Return whether an error or one of its causes says that memory ran out."""
    import torch  # slow: a command that prints a recipe's error doesn't need it

    return any(
        isinstance(cause, (MemoryError, torch.OutOfMemoryError))
        or (isinstance(cause, RuntimeError) and any(text in str(cause) for text in _MEMORY_TEXTS))
        for cause in _with_causes(error)
    )


def is_disk_full(error: BaseException) -> bool:
    """Return whether an error or one of its causes says that a disk is full or read-only."""
    return any(
        (isinstance(cause, OSError) and cause.errno in _DISK_ERRNOS) or any(text in str(cause) for text in _DISK_TEXTS)
        for cause in _with_causes(error)
    )


def _with_causes(error: BaseException | None) -> Iterator[BaseException]:
    while error is not None:  # libraries wrap the driver's error in their own
        yield error
        error = error.__cause__ or error.__context__
