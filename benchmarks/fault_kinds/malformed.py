"""Generated damaged JSON files and safetensors headers in a run, its base model and the cache: no internal error, no long wait.

Every case changes one file's values, shape, encoding or length, then calls all that reads it before a model is loaded; one case
in ten runs a whole command. In half of the cases the manifest of the file's folder and its checksum are made anew, as for a
file that somebody has edited on purpose.
"""

from __future__ import annotations

import json
import os
import random
import re
import shutil
import signal
import traceback
from pathlib import Path
from typing import TYPE_CHECKING, Any

from app.report import page
from benchmarks.fault_kinds.damage import Scene, run_command
from benchmarks.fault_kinds.runs import in_fork, wait_for, work_of
from finetune.card.context import measured_context
from finetune.checksum import with_checksum
from finetune.errors import FinetuneError
from finetune.evaluate.rows import held_out_rows
from finetune.memory import cache
from finetune.model.adapter_files import adapter_problems
from finetune.model.configuration import read_config
from finetune.model.weights import check_weights, weights_fingerprint
from finetune.planner.base_adapter import read_base_adapter
from finetune.planner.history import read_history
from finetune.planner.plan import read_plan
from finetune.recipe import load_recipe
from finetune.run.base_adapter import base_adapter_of
from finetune.run.directory import list_runs, require_data
from finetune.run.fingerprint import require_own_adapter
from finetune.run.retry import adjusted_plan
from finetune.run.seal import MANIFEST, newest_verified, write_manifest
from finetune.run.state import read_state

if TYPE_CHECKING:
    from collections.abc import Callable

    from benchmarks.fault_kinds.tally import Tally

_ODD_VALUES: tuple[Any, ...] = (
    None, True, False, 0, -1, 2**31, 2**63, 2**200, 1e308, -0.0, "", "x", "\x1b[2J", "\ud800", "\u202e", [], {}, [[]], [None],
    {"": 0}, "0", "../../x", "/dev/zero", "nan", ["a"] * 5, {"a": {"b": []}}, float("nan"), float("inf"),
)  # fmt: skip
_DEEP = b"[" * 100_000
_LIMIT_S = 60
#: Share of cases in which a whole command is run.
_COMMANDS = 0.1
_INTERNAL = re.compile(r"Internal error|Traceback \(most recent")


def malformed_cases(rng: random.Random, tally: Tally, folder: Path) -> None:
    """Damage JSON files and headers until the tally has its cases or the time is over."""
    scene = Scene(folder)
    run, base = scene.finished, scene.base
    (folder / "rows.jsonl").write_text('{"prompt": "a", "completion": "b"}\n' * 4, encoding="utf-8")
    in_run: tuple[tuple[str, ...], ...] = (
        ("runs", "--json"), ("report", str(run.path), "--output", str(folder / "report.html")),
        ("eval", str(run.path), "--rows", "1", "--score", "loss"), ("watch", str(run.path), "--json"),
        ("merge", str(run.path), "--output", str(folder / "merged")), ("push", str(run.path), "a/b", "--dry-run"),
        ("plan", "tiny-cpu", f"adapter_name_or_path={run.path}"), ("resume",),
    )  # fmt: skip
    of_base = (("plan", "tiny-cpu", f"model_name_or_path={base}"), ("eval", str(run.path), "--rows", "1", "--score", "loss"))
    targets = [
        (run.path, in_run), (run.path, in_run), (base, of_base), (scene.cache, of_base),
        (folder / "rows.jsonl", (("data", "tiny-cpu", f"dataset.path={folder}/rows.jsonl"),)),
    ]  # fmt: skip
    os.chdir(folder)
    while tally.goes_on:
        target, commands = rng.choice(targets)
        command, path = rng.choice(commands), rng.choice(_json_files(target))
        if command == ("resume",) and target == run.path:
            path = scene.interrupted.path / path.relative_to(run.path)
            path = path if path.is_file() else scene.interrupted.plan
        content, stat = path.read_bytes(), path.stat()
        how = _malform(path, content, rng)
        if rng.random() < 0.5 and (path.parent / MANIFEST).is_file() and path.name != MANIFEST:
            _seal_again(path.parent)
        problem = _problem(scene, command) if rng.random() < _COMMANDS else _problem_of_readers(scene)
        shutil.rmtree(folder / "merged", ignore_errors=True)
        scene.restore(path, content, stat)
        if target == folder / "rows.jsonl":
            path.write_bytes(content)
        if problem:
            tally.fail(f"{' '.join(command)[:60]} after {path.relative_to(folder.parent)} {how}: {problem}")
        else:
            tally.outcomes["told or used"] += 1


def _json_files(target: Path) -> list[Path]:
    if target.is_file():
        return [target]
    return [path for path in sorted(target.rglob("*")) if path.suffix in (".json", ".jsonl", ".safetensors") and path.is_file()]


def _malform(path: Path, content: bytes, rng: random.Random) -> str:
    """Replace a file's JSON, or header, by a damaged one; returns how."""
    is_header = path.suffix == ".safetensors"
    size = int.from_bytes(content[:8], "little") if is_header else len(content)
    text = content[8 : 8 + size] if is_header else content
    lines = text.splitlines(keepends=True) if path.suffix == ".jsonl" and text else [text]
    number = rng.randrange(len(lines))
    how, lines[number] = _malformed(lines[number], rng)
    text = b"".join(lines)
    path.write_bytes(len(text).to_bytes(8, "little") + text + content[8 + size :] if is_header else text)
    return how


def _malformed(text: bytes, rng: random.Random) -> tuple[str, bytes]:
    """A damaged text of JSON, and how it is damaged."""
    changes: dict[str, Callable[[], bytes]] = {
        "cut off": lambda: text[: rng.randrange(max(1, len(text)))],
        "utf-16": lambda: text.decode("utf-8", "replace").encode("utf-16"),
        "latin-1": lambda: text + b"\xff\xe9",
        "random bytes": lambda: rng.randbytes(rng.randrange(200)),
        "nested deeply": lambda: rng.choice((_DEEP, _DEEP + b"]" * 100_000, b'{"a":' * 5_000, b"[" * 90 + b"]" * 90)),
        "another value": lambda: json.dumps(rng.choice(_ODD_VALUES)).encode(),
        "a doubled text": lambda: text + text,
    }
    if rng.random() < 0.3:
        how = rng.choice(sorted(changes))
        return how, changes[how]()
    try:
        values = json.loads(text)
    except ValueError:
        return "cut off", changes["cut off"]()
    how = _change_a_value(values, rng) if isinstance(values, (dict, list)) and values else "unchanged"
    changed = json.dumps(values)
    resealed = isinstance(values, dict) and values.pop("checksum", None) and values and rng.random() < 0.7
    return how, (with_checksum(json.dumps(values)) if resealed else changed).encode() + (b"\n" if text.endswith(b"\n") else b"")


def _change_a_value(values: Any, rng: random.Random) -> str:
    """Change, remove or add a random value at any depth; returns which."""
    way = []
    while True:
        key = rng.choice(list(values)) if isinstance(values, dict) else rng.randrange(len(values))
        way.append(str(key)[:30])
        if isinstance(values[key], (dict, list)) and values[key] and rng.random() < 0.7:
            values = values[key]
            continue
        odd = rng.choice(_ODD_VALUES)
        if rng.random() < 0.2:
            del values[key]
            return f"without {'.'.join(way)}"
        if rng.random() < 0.1 and isinstance(values, dict):
            values[str(odd)] = values.pop(key)
            return f"{'.'.join(way)} renamed {odd!r:.20}"
        values[key] = odd
        return f"{'.'.join(way)} = {odd!r:.20}"


def _seal_again(folder: Path) -> None:
    """Make the manifest of a folder anew, with the values that it had beside the hashes."""
    values = json.loads((folder / MANIFEST).read_text(encoding="utf-8"))
    write_manifest(folder, {name: value for name, value in values.items() if name not in ("files", "seal")})


def _problem_of_readers(scene: Scene) -> str:
    """What is raised by the functions with which commands read a run, its base and caches, beside what a user is told."""
    run, settings = scene.finished, load_recipe("tiny-cpu", [f"model_name_or_path={scene.base}"])
    readers: tuple[Callable[[], Any], ...] = (
        lambda: read_plan(run.plan), lambda: adjusted_plan(run), lambda: read_state(run), lambda: page([run]),
        lambda: require_data(run), lambda: held_out_rows(run, None), lambda: require_own_adapter(run, run.adapter),
        lambda: adapter_problems(run.adapter), lambda: read_base_adapter(str(run.path)), lambda: base_adapter_of(run),
        lambda: newest_verified(run.checkpoints), lambda: adjusted_plan(scene.interrupted), lambda: list_runs(run.path.parent),
        lambda: check_weights(scene.base), lambda: read_config(settings), lambda: weights_fingerprint(settings),
        lambda: read_history("cpu"), lambda: measured_context("RTX 4090"),
        lambda: [cache.read(path.stem) for path in (scene.cache / "forecasts").glob("*.json")],
    )  # fmt: skip
    signal.alarm(_LIMIT_S)
    problems = []
    for reader in readers:
        try:
            reader()
        except FinetuneError:
            continue
        except Exception:  # noqa: BLE001 - which a command would show as an internal error
            problems.append(traceback.format_exc()[-1500:])
    signal.alarm(0)
    return "\n".join(problems)


def _problem(scene: Scene, command: tuple[str, ...]) -> str:
    """What is wrong with how a command ended; empty for a result or a message."""
    log = scene.folder / "output"
    log.unlink(missing_ok=True)

    def work() -> int:
        signal.alarm(_LIMIT_S)
        if command != ("resume",):
            return run_command(list(command))
        try:
            adjusted_plan(scene.interrupted)
        except FinetuneError as error:
            return error.exit_code
        return work_of(scene.interrupted)()

    code = wait_for(in_fork(work, log))
    text = log.read_text(encoding="utf-8", errors="replace")
    if command == ("resume",):
        text = "" if code in (0, 1, 2, 7) and "99" not in text else text
    internal = _INTERNAL.search(text)
    return f"exit {code}: {text[-1500:]}" if internal or code < 0 or code == 99 else ""
