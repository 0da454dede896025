"""The real supervisor and worker as forks of the test process: separate processes, without seconds of imports."""

import gc
import os
import signal
import sys
import time
import traceback


class Forked:
    """A function in a forked process, with the interface of subprocess.Popen."""

    def __init__(self, function, log, environment, new_session=False):
        gc.freeze()  # or every child's collector would scan all of pytest's objects
        self.returncode = None
        self.pid = os.fork()
        if self.pid:
            return
        code = 99
        try:
            if new_session:
                os.setsid()
            for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
                signal.signal(number, signal.SIG_DFL)
            os.dup2(log.fileno(), 1)
            os.dup2(log.fileno(), 2)
            os.environ.clear()
            os.environ.update(environment)
            code = function()
        except BaseException:  # noqa: BLE001 - a child must never return into pytest
            traceback.print_exc()
        finally:
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(code)

    def poll(self):
        if self.returncode is None:
            pid, status = os.waitpid(self.pid, os.WNOHANG)
            if pid:
                self.returncode = os.waitstatus_to_exitcode(status)
        return self.returncode

    def wait(self):
        while self.poll() is None:
            time.sleep(0.01)
        return self.returncode

    def send_signal(self, number):
        if self.poll() is None:
            os.kill(self.pid, number)

    def kill(self):
        self.send_signal(signal.SIGKILL)


def supervise(run, fault, **environment):
    """Start the supervisor of a run whose worker has one fault in it, see child_faults.py."""
    with run.log.open("ab") as log:
        return Forked(lambda: _supervisor(run, fault), log, {**os.environ, **environment}, new_session=True)


def _supervisor(run, fault):
    from finetune.run import supervise

    def worker():
        from child_faults import put_in

        from finetune.run.worker import main

        put_in(*fault.split(":"), run.path)
        sys.argv = ["worker", str(run.path)]
        return main()

    def start(_command, *, stdout, env, **_):
        return Forked(worker, stdout, env)

    supervise.subprocess.Popen = start
    sys.argv = ["supervise", str(run.path)]
    return supervise.main()
