"""Supervisor of one run, in its own session: `python -m finetune.run.supervise [RUN]`. Imports no GPU library.

Starts, signals, kills and restarts the worker. Without RUN it is an early supervisor: its worker imports libraries while the
run is planned, and the standard input names the run.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import psutil

from finetune import errors
from finetune.card.card import allocator_environment
from finetune.distributed import Launcher, is_distributed
from finetune.events import Event, EventReader, EventWriter, OutOfMemory, Retry, RunWarning, Start, State, newest
from finetune.files import write_json
from finetune.planner.plan import read_plan
from finetune.run.card import Queue, cards_of, holders_of, replacement_message, visibility
from finetune.run.directory import RunDirectory, read_stop_requests
from finetune.run.retry import MOST_RETRIES, adjust, adjusted_plan, next_smaller, no_smaller_plan_message
from finetune.run.state import ENDED, process_record
from finetune.system import SETTINGS, WINDOWS, ignore_hangup, keep_private, receive_line, redirect_output, send_line, take_lock

_POLL_S = 0.1
_RESERVE_BYTES = 16 * 1024


def main() -> int:
    """Run the supervisor process."""
    keep_private()
    early_worker = None
    if len(sys.argv) == 1:
        early_worker = subprocess.Popen(
            worker_command(), env=worker_environment(), bufsize=0,
            stdin=subprocess.PIPE, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
        )  # fmt: skip
        if (path := receive_line()) is None:
            early_worker.kill()
            early_worker.wait()
            return 0
        sys.argv.append(path)
        redirect_output(RunDirectory(Path(path)).log)
    run = RunDirectory(Path(sys.argv[1]))
    lock = take_lock(run.lock, wait_s=1)  # a process that tests the lock holds it for a moment
    if lock is None:
        print(f"{run.path} is already running", file=sys.stderr)  # noqa: T201
        return 2
    return Supervisor(run, early_worker).main()


class Supervisor:
    """Runs attempts of one run until it ends."""

    def __init__(self, run: RunDirectory, early_worker: subprocess.Popen[bytes] | None = None) -> None:
        self.run, self.early_worker = run, early_worker
        self.signals: list[int] = []
        self.requests_read = 0  # number of requests already read from the run's file
        self.reader = EventReader(run.events, run.events.stat().st_size if run.events.exists() else 0)
        self.events: list[Event] = []  # since this start
        self.stop_deadline_s = float(os.environ.get("FINETUNE_STOP_DEADLINE_S", 120))
        self.cards = cards_of(read_plan(run.plan))
        self.last_write: tuple[int | None, float] = (None, 0.0)  # of the events (ns), and when it was noticed (monotonic, s)
        self.hang_deadline_s = float(os.environ.get("FINETUNE_HANG_DEADLINE_S", 1800))

    def main(self) -> int:
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, lambda number, _: self.signals.append(number))
        ignore_hangup()
        with contextlib.suppress(OSError):
            # freed in `_emit`, so that the final state can be written on a full disk
            self.run.reserve.write_bytes(bytes(_RESERVE_BYTES))
        try:
            return self._supervise()
        finally:
            self.run.reserve.unlink(missing_ok=True)

    def _supervise(self) -> int:
        card = read_plan(self.run.plan).card
        if card.is_cpu:
            return self._run_attempts()
        queue = Queue(self.cards or [card.name])
        queue.join(self.run.path)
        try:
            return self._run_attempts() if self._wait_for_turn(queue) else self._emit_final_state(128 + self.signals[0])
        finally:
            queue.leave()

    def _wait_for_turn(self, queue: Queue) -> bool:
        reported: list[str] | None = None
        while ahead := queue.ahead():
            self._read_requests()
            if self.signals:
                return False
            if ahead != reported:
                self._kill_early_worker()  # a long wait: its libraries take host memory
                self._emit(State(state="queued", message=f"waiting for {ahead[-1]}; {len(ahead)} ahead in the queue"))
                reported = ahead
            time.sleep(_POLL_S)
        return True

    def _run_attempts(self) -> int:
        attempt = 0
        if message := replacement_message(read_plan(self.run.plan), self.cards):
            self._emit(RunWarning(message=message))
        while True:
            attempt += 1
            self._emit(State(state="starting", attempt=attempt))
            code = self._run_attempt()
            self.events += self.reader.new()
            if self.signals or code != errors.OutOfMemory.exit_code or not self._retry_smaller(attempt):
                return self._emit_final_state(code)

    def _run_attempt(self) -> int:
        plan = adjusted_plan(self.run)
        launcher = Launcher(self.run.path, self.run.log, plan) if is_distributed(plan.settings) else None
        environment = worker_environment(self.cards)
        command = worker_command(self.run.path)
        if launcher is not None:
            command, environment = launcher.command(), environment | launcher.environment()
            self._kill_early_worker()
        if (worker := self._take_early_worker()) is None:
            with self.run.log.open("ab") as log:
                worker = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=log, stderr=log, env=environment)
        try:
            write_json(self.run.process, {"supervisor": process_record(os.getpid()), "worker": process_record(worker.pid)})
        except OSError:  # nobody could stop a worker without a record
            _kill_tree(worker)
            worker.wait()
            return errors.DiskFull.exit_code
        self.last_write = (None, time.monotonic())
        handled_signals, requested_s, must_kill = 0, 0.0, False
        while worker.poll() is None:
            self._read_requests()
            if len(self.signals) > handled_signals:
                handled_signals += 1  # one at a time: another signal may arrive meanwhile
                if handled_signals > 1 or not self._has_started():  # a second signal, or nothing to save yet
                    must_kill = True
                else:
                    self._emit(State(state="pausing"))
                    if launcher is not None:
                        launcher.send_signal(worker, self.signals[0])
                    elif not (self.requests_read or WINDOWS):  # the worker reads the run's file; Windows can't signal it
                        worker.send_signal(self.signals[0])
                    requested_s = time.monotonic()
            if requested_s and time.monotonic() - requested_s > self.stop_deadline_s:
                must_kill = True
            if self._is_hanging():
                self._emit(RunWarning(message=f"no progress for {self.hang_deadline_s:.0f} s; the process was killed"))
                must_kill = True
            if must_kill:
                _kill_tree(worker)
            time.sleep(_POLL_S)
        if launcher is None or must_kill:
            return worker.returncode
        return launcher.exit_status(worker.returncode, self._emit)

    def _take_early_worker(self) -> subprocess.Popen[bytes] | None:
        worker, self.early_worker = self.early_worker, None
        if worker and worker.stdin:
            with contextlib.suppress(OSError), worker.stdin as pipe:  # if it has ended, a new worker logs the reason
                send_line(pipe, {"run": str(self.run.path), "environment": visibility(self.cards)})
                return worker
        return None

    def _kill_early_worker(self) -> None:
        if self.early_worker is not None:
            self.early_worker.kill()
            self.early_worker.wait()
            self.early_worker = None

    def _read_requests(self) -> None:
        requests = read_stop_requests(self.run)
        self.signals += requests[self.requests_read :]
        self.requests_read = max(self.requests_read, len(requests))

    def _has_started(self) -> bool:
        self.events += self.reader.new()
        return any(isinstance(event, Start) for event in self.events)

    def _is_hanging(self) -> bool:
        with contextlib.suppress(FileNotFoundError):
            # monotonic: stands still while the machine sleeps, and nobody sets it
            written_ns, now_s = self.run.events.stat().st_mtime_ns, time.monotonic()
            if written_ns != self.last_write[0]:
                self.last_write = (written_ns, now_s)
            return now_s - self.last_write[1] > self.hang_deadline_s and self._has_started()
        return False

    def _retry_smaller(self, attempt: int) -> bool:
        failure = newest(OutOfMemory, self.events)
        phase = (failure.phase if failure else None) or "train"
        plan = adjusted_plan(self.run)
        changes = next_smaller(plan, phase)
        # several machines: each would need the same smaller plan
        if changes is None or attempt > MOST_RETRIES or plan.settings.launch.num_machines > 1:
            message = no_smaller_plan_message(plan, phase, holders_of(self.cards), self.run.recipe)
            if changes is not None:
                untried = " ".join(f"{name}={value}" for name, value in changes.items())
                tried = f" after {attempt - 1} retries" if attempt > 1 else ""
                message = f"out of memory in phase {phase}{tried}; the next setting to try:  {untried}"
            self._emit_end("failed", errors.OutOfMemory.exit_code, message)
            return False
        adjust(self.run, changes)
        self._emit(Retry(attempt=attempt + 1, reason=f"out of memory in phase {phase}", changes=changes))
        return True

    def _emit_final_state(self, code: int) -> int:
        # the worker emits the final state, unless it was killed before
        last = newest(State, self.events)
        if last is not None and last.state in ENDED:
            return code if last.exit_code is None else last.exit_code
        sealed = any(self.run.checkpoints.glob("checkpoint-*"))
        start = "from the last checkpoint" if sealed else "from the beginning (there is no checkpoint yet)"
        resume = f"resume {start} with: finetune resume {self.run.path}"
        if self.signals:
            code = 128 + self.signals[0]
            killed = "killed without a new checkpoint" if sealed else "killed"
            self._emit_end("paused", code, f"{killed if self._has_started() else 'stopped before training began'}; {resume}")
        elif code == errors.DiskFull.exit_code:
            self._emit_end("paused", code, f"the disk is full; free some space, then {resume}")
        elif code == -9:  # SIGKILL, a name that Windows lacks
            self._emit_end("failed", errors.FAILED, f"the process was killed (often: out of host memory); {resume}")
        else:
            self._emit_end("failed", errors.FAILED, f"the process ended with status {code}, see {self.run.log}; {resume}")
        return code if code > 0 else errors.FAILED

    def _emit_end(self, state: str, exit_code: int, message: str) -> None:
        self._emit(State(state=state, exit_code=exit_code, message=message))

    def _emit(self, event: Event) -> None:
        # while the worker lives, it writes all other events: one writer at a time
        try:
            self._write(event)
        except OSError:  # a full disk must not end the supervisor; without a reserve the state becomes `lost`
            self.run.reserve.unlink(missing_ok=True)
            with contextlib.suppress(OSError):
                self._write(event)
        self.events += self.reader.new()

    def _write(self, event: Event) -> None:
        with contextlib.closing(EventWriter(self.run.events)) as writer:
            writer.emit(event)


def worker_command(*run: Path) -> list[str]:
    """Return the command line of the training process; without a run it waits until its input names one."""
    return [sys.executable, "-m", "finetune.run.worker", *map(str, run)]


def worker_environment(cards: Sequence[str] = ()) -> dict[str, str]:
    """Return the worker's environment, to be set before torch is imported."""
    return {
        # before os.environ, which overrides it: the user's own PYTORCH_ALLOC_CONF wins
        **allocator_environment(),
        # on Hopper and B200 torch prefers cuDNN's attention: no forecast of its buffers, and a new plan for each length
        "TORCH_CUDNN_SDPA_DEPRIORITIZED": "1",
        "PYTHONUNBUFFERED": "1",
        **os.environ,
        **SETTINGS,
        "TOKENIZERS_PARALLELISM": "false",
        "PYTHONUTF8": "1",  # also for files that libraries open without an encoding
        "PYTHONSAFEPATH": "1",  # a datasets.py or torch.py in the working folder must not be imported
        # torch numbers the GPUs in another order than the driver, and the trainer would use all visible GPUs
        **visibility(cards),
    }


def _kill_tree(process: subprocess.Popen[bytes]) -> None:
    with contextlib.suppress(psutil.NoSuchProcess):
        for child in psutil.Process(process.pid).children(recursive=True):
            with contextlib.suppress(psutil.NoSuchProcess):
                child.kill()
    process.kill()


if __name__ == "__main__":
    sys.exit(main())
