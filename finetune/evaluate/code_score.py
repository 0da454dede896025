"""Score of Python code by the tests that it passes, in a sandbox of bubblewrap: no network, no files of the user's."""

from __future__ import annotations

import functools
import os
import re
import secrets
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from finetune.errors import CommandError, DataError, PackagesError
from finetune.evaluate.scorers import RowScore
from finetune.files import parse_json

#: Seconds, address space and size of a file (bytes) of one program.
_RUN_S, _MAX_MEMORY, _MAX_FILE = 10, 2**31, 2**24
_FENCE = re.compile(r"```(?:python|py)?[^\S\n]*\n(.*?)```", re.S | re.I)
_EXAMPLE = 'A line for each prompt: {"prompt": "...", "tests": "assert add(1, 2) == 3"}'


class CodeScore:
    """Runs answers with the tests of their prompts, which the JSON lines of `path` give.

    A line has `prompt` and `tests` (code), or the tests as MBPP (`test_list`, after `test_setup_code`) or HumanEval (`test`
    with `entry_point`) have them. Raises CommandError for a file that can't be used, PackagesError without bubblewrap.
    """

    def __init__(self, path: str) -> None:
        self._tests, self._path = _read_tests(path), path
        problem = _sandbox_problem()
        if problem:
            raise PackagesError(
                f"--score code runs code in bubblewrap's sandbox only: {problem}", "apt install bubblewrap (Linux)"
            )
        self._passes = functools.cache(_passes)

    @property
    def notice(self) -> str:
        return f"the answers' code is run here, {_RUN_S} s each, without network; it can't read your home or write files"

    def __call__(self, prompt: str, expected: str, answer: str) -> RowScore:
        """1 where the answer's code passes the tests of `prompt`. `valid`: whether it is Python.

        Raises DataError for a prompt without tests, and for an expected answer that does not pass.
        """
        tests = self._tests.get(prompt.strip())
        if tests is None:
            raise DataError(f"{self._path} has no tests for the prompt {prompt[:100]!r}", _EXAMPLE)
        if not self._passes(python_code(expected), tests):
            problem = f"the expected answer to {prompt[:100]!r} does not pass its tests"
            raise DataError(problem, f"Correct the row, or its tests in {self._path}.")
        code = python_code(answer)
        return RowScore(float(self._passes(code, tests)), {}, _is_python(code))


def python_code(text: str) -> str:
    """The code in an answer: in its first code block, or all of it."""
    block = _FENCE.search(text)
    return block[1] if block else text


def _is_python(code: str) -> bool:
    try:
        compile(code, "answer", "exec", dont_inherit=True)
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return False
    return bool(code.strip())


def _passes(code: str, tests: str) -> bool:
    """Whether `code` and then `tests` run to the end in the sandbox."""
    if not _is_python(code):
        return False
    last_line = secrets.token_hex()  # an early exit is no pass, unless the code reads this in its own frame
    program = f"{code}\n\n{tests}\n\nprint({last_line!r})\n"
    with tempfile.TemporaryFile() as output:  # a file, so that what is printed has an end
        try:
            process = subprocess.run(
                [*_sandbox(), sys.executable, "-I", "-"],
                input=program.encode("utf-8"), stdout=output, stderr=subprocess.DEVNULL, timeout=_RUN_S, check=False,
            )  # fmt: skip
        except (subprocess.TimeoutExpired, UnicodeEncodeError):
            return False
        output.seek(-min(output.tell(), len(last_line) + 1), os.SEEK_END)
        return process.returncode == 0 and output.read().decode("utf-8", "replace").strip() == last_line


def _sandbox() -> list[str]:
    """A command's beginning: limits, the system and this Python to read, a folder in memory to write in, no network."""
    limits = ["prlimit", f"--cpu={_RUN_S}", f"--as={_MAX_MEMORY}", f"--fsize={_MAX_FILE}", "--core=0", "--"]
    folders = {"/usr", "/bin", "/lib", "/lib64", "/etc/alternatives", sys.prefix, sys.base_prefix}
    mounts = [part for folder in sorted(folders) if Path(folder).exists() for part in ("--ro-bind", folder, folder)]
    # /tmp first: a Python that is installed below it would be hidden
    own = ["--dev", "/dev", "--proc", "/proc", "--size", str(_MAX_FILE), "--tmpfs", "/tmp", *mounts, "--chdir", "/tmp"]
    return [*limits, "bwrap", "--unshare-all", "--die-with-parent", "--new-session", "--clearenv", *own]


@functools.cache
def _sandbox_problem() -> str | None:
    """Why no sandbox can be made here, or None."""
    if not shutil.which("bwrap"):
        return "bwrap is not installed"
    process = subprocess.run([*_sandbox(), sys.executable, "-I", "-c", ""], capture_output=True, text=True, check=False)
    return process.stderr.strip()[:200] if process.returncode else None


def _read_tests(path: str) -> dict[str, str]:
    """The tests of each prompt. Raises CommandError."""
    try:
        lines = Path(path).read_text("utf-8").split("\n")  # JSON lines may have U+2028
    except (OSError, ValueError) as error:
        raise CommandError(f"{path} can't be read: {error}", f"Give it as --tests FILE. {_EXAMPLE}") from None
    tests: dict[str, str] = {}
    for number, line in enumerate(lines, start=1):
        if not line.strip():
            continue
        try:
            row = parse_json(line)
            prompt, code = row["prompt"].strip(), _tests_of(row)
        except (ValueError, KeyError, TypeError, AttributeError):
            raise CommandError(f"{path}, line {number}: not a prompt with tests", _EXAMPLE) from None
        if tests.setdefault(prompt, code) != code:
            raise CommandError(f"{path}, line {number}: the prompt has other tests in an earlier line", "Join both.")
    return tests


def _tests_of(row: Mapping[str, Any]) -> str:
    """The code of a row's tests. Raises KeyError, TypeError or ValueError where it has none."""
    if "test_list" in row:
        code = "\n".join([row.get("test_setup_code") or "", *row["test_list"]])
    elif "entry_point" in row:
        code = f"{row['test']}\n\ncheck({row['entry_point']})"
    else:
        code = row["tests"]
    if not isinstance(code, str) or not code.strip() or not _is_python(code):
        raise ValueError("no tests")
    return code
