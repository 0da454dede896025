"""One changed bit or byte in a file of a run, its base model or the cache: refused, made again, said, or without effect.

A case changes one byte and uses what was changed: resumes an interrupted run; evaluates, merges or reports a finished one; asks
it; plans. In half of the cases the file keeps its time, as on a failing disk. Another result without a message is a failure.
"""

from __future__ import annotations

import html
import json
import os
import random
import re
import shutil
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING

from benchmarks.fault_kinds.runs import (
    file_hash,
    fresh_copy,
    in_fork,
    new_run,
    result_of,
    start_training,
    train,
    wait_for,
    work_of,
)
from finetune.bundled import model_path
from finetune.errors import FinetuneError
from finetune.events import RunWarning, Start, read_events
from finetune.files import cache_dir
from finetune.run.directory import RunDirectory
from finetune.run.retry import adjusted_plan
from finetune.run.seal import newest_verified
from finetune.run.state import read_state

if TYPE_CHECKING:
    from benchmarks.fault_kinds.tally import Tally

#: A message about the damage, beside a result that differs.
_SAID = re.compile(r"has changed|can't be (read|used)|skipped|left out|made again|was .* and is now|missing|damaged|not those")
_INTERNAL = re.compile(r"Internal error|Traceback|^\w*(Error|Exception): ", re.MULTILINE)
#: What differs each time.
_TIMES = re.compile(r'"(seconds|reused|took_s|\w*_s)": [^,}]+|Made [^<]+')


class Scene:
    """A base model, an interrupted and a finished run on it, the cache, and how to put everything back."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.base, self.cache = folder, folder / "base", cache_dir()
        shutil.copytree(model_path("tiny"), self.base)
        runs = folder / "runs"
        self.interrupted, self.finished = RunDirectory(runs / "interrupted"), RunDirectory(runs / "finished")
        new_run(
            self.finished.path, f"model_name_or_path={self.base}", "dataset.test_split_size=2", "max_steps=6", "eval_steps=3"
        )
        fresh_copy(self.finished, self.interrupted.path)
        if code := train(self.finished):
            raise SystemExit(f"the run to damage ended with {code}: {self.finished.log}")
        self.expected = result_of(self.finished)
        (pid,) = start_training(self.interrupted)
        while not (self.interrupted.checkpoints / "checkpoint-4").is_dir():
            time.sleep(0.005)
        os.kill(pid, 9)
        wait_for(pid)
        self.uses = {name: self.output_of(arguments) for name, arguments in self.commands().items() for _ in range(2)}
        self.pristine = {path: shutil.copytree(path, folder / "pristine" / path.name) for path in self.copied()}

    def copied(self) -> list[Path]:
        """Folders that are copied back after a case; the base's files are changed back, as copies would be other inodes."""
        return [self.interrupted.path, self.finished.path, self.cache]

    def commands(self) -> dict[str, list[str]]:
        """Arguments of each command that uses the finished run or the cache."""
        run, merged = str(self.finished.path), str(self.folder / "merged")
        return {
            "eval": ["eval", run, "--rows", "2", "--json"],
            "merge": ["merge", run, "--output", merged, "--json"],
            "report": ["report", run, "--output", str(self.folder / "report.html")],
            "plan": ["plan", "tiny-cpu", "--gpu", "rtx-4090", f"model_name_or_path={self.base}", "--json"],
        }

    def output_of(self, arguments: list[str]) -> tuple[int, str, str]:
        """Exit code, result without times, and all that a command has printed."""
        log, merged, page = self.folder / "output", self.folder / "merged", self.folder / "report.html"
        log.unlink(missing_ok=True)
        shutil.rmtree(merged, ignore_errors=True)
        page.unlink(missing_ok=True)
        code = wait_for(in_fork(lambda: run_command(arguments), log))
        text = log.read_text(encoding="utf-8", errors="replace")
        result = page.read_text(encoding="utf-8") if page.exists() else text[text.find("{") :]
        if merged.is_dir():
            result = json.dumps({path.name: file_hash(path) for path in sorted(merged.iterdir()) if path.name != "README.md"})
        return code, _TIMES.sub("", result), text + (page.read_text(encoding="utf-8") if page.exists() else "")

    def restore(self, path: Path, content: bytes, stat: os.stat_result) -> None:
        """Everything as it was."""
        for target, source in self.pristine.items():
            shutil.rmtree(target, ignore_errors=True)
            shutil.copytree(source, target)
        if self.base in path.parents:
            path.write_bytes(content)
            os.utime(path, ns=(stat.st_atime_ns, stat.st_mtime_ns))


def run_command(arguments: list[str]) -> int:
    """Run a command of finetune; returns its exit code."""
    from finetune.cli import main

    sys.argv = ["finetune", *arguments]
    code = main()
    sys.stdout.flush()
    sys.stderr.flush()
    return code


def damage_cases(rng: random.Random, tally: Tally, folder: Path) -> None:
    """Damage files until the tally has its cases or the time is over."""
    scene = Scene(folder)
    while tally.goes_on:
        use = rng.choice(("resume", "resume", *scene.commands()))
        run = scene.interrupted if use == "resume" else scene.finished
        folders = [scene.cache] if use == "plan" else [run.path, run.path, scene.base, scene.cache]
        files = [path for path in sorted(rng.choice(folders).rglob("*")) if path.is_file() and path.stat().st_size]
        path = rng.choice(files)
        content, stat = path.read_bytes(), path.stat()
        what = _damage(path, content, stat, rng)
        outcome = _resume(scene) if use == "resume" else _use(scene, use)
        if outcome.startswith("FAILED"):
            tally.fail(f"{use} after {what} of {path.relative_to(folder.parent)}: {outcome}")
        else:
            tally.outcomes[outcome] += 1
        scene.restore(path, content, stat)


def _damage(path: Path, content: bytes, stat: os.stat_result, rng: random.Random) -> str:
    """Change one bit or byte of a file; returns which."""
    index = rng.randrange(len(content))
    flip = 1 << rng.randrange(8) if rng.random() < 0.5 else rng.randrange(1, 256)
    keeps_time = rng.random() < 0.5
    with path.open("r+b") as file:
        file.seek(index)
        file.write(bytes([content[index] ^ flip]))
    if keeps_time:
        os.utime(path, ns=(stat.st_atime_ns, stat.st_mtime_ns))
    return f"byte {index} of {len(content)} xor {flip}{', same time' if keeps_time else ''}"


def _resume(scene: Scene) -> str:
    run = scene.interrupted
    old_lines = len(read_events(run.events))
    try:
        adjusted_plan(run)
    except FinetuneError:
        return "refused"
    code = wait_for(in_fork(work_of(run), run.log))
    events = read_events(run.events)[old_lines - 1 :]
    messages = [event.message for event in events if isinstance(event, RunWarning)]
    messages += [" ".join(event.approximate_because) for event in events if isinstance(event, Start) and not event.exact]
    if code:
        message = read_state(run).message or ""
        return f"FAILED exit {code}: {message[:300]}" if code == 99 or _INTERNAL.search(message) or not message else "refused"
    try:
        result = result_of(run)
    except ValueError as error:
        result = {"error": str(error)}
    if result == scene.expected:
        return "equal" if newest_verified(run.checkpoints)[0] else "FAILED no checkpoint"
    differing = ", ".join(name for name in scene.expected if scene.expected[name] != result.get(name))
    return "said" if any(_SAID.search(message) for message in messages) else f"FAILED silent difference: {differing}"


def _use(scene: Scene, use: str) -> str:
    expected_code, expected, _ = scene.uses[use]
    code, result, text = scene.output_of(scene.commands()[use])
    if _INTERNAL.search(text):
        return f"FAILED internal error: {text[-400:]}"
    if (code, result) == (expected_code, expected):
        return "equal"
    if code != expected_code:
        return "refused" if code in (2, 4) else f"FAILED exit {code}: {text[-300:]}"
    is_said = _SAID.search(text) or _times_said(result) > _times_said(expected)
    return "said" if is_said else f"FAILED silent difference: {_first_difference(expected, result)}"


def _times_said(page: str) -> int:
    """How often a result, such as a report's page, says of something that it is not as it was."""
    return len(_SAID.findall(html.unescape(page)))


def _first_difference(expected: str, result: str) -> str:
    index = next((at for at, (old, new) in enumerate(zip(expected, result, strict=False)) if old != new), 0)
    return f"{expected[max(0, index - 60) : index + 60]!r} became {result[max(0, index - 60) : index + 60]!r}"
