"""The real supervisor and worker as forks of the test process."""

import os
import sys

from killed import Forked


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
