"""Faults to put into the real worker, once each. Not a test; used by the tests beside it.

A fault is PLACE:WHAT. PLACE: load, step1, step5, evaluate or save. WHAT: none, oom, driver_oom, kill or hang.
"""

import os
import signal
import time
from pathlib import Path


def strike(what):
    import torch

    if what == "oom":
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 1.50 GiB. GPU 0 has a total capacity of 23.55 GiB")
    if what == "driver_oom":
        raise RuntimeError("CUDA error: out of memory\nCUDA kernel errors might be asynchronously reported")
    if what == "kill":
        os.kill(os.getpid(), signal.SIGKILL)
    if what == "hang":
        time.sleep(100_000)


def once(run, what):
    mark = Path(run) / "fault-struck"
    if not mark.exists():
        mark.touch()
        strike(what)


def waiting_after(step, until):
    """A fault that waits after this step's event until the file `until` is there; nobody waits for it any more after 900 s."""

    def patch():
        from finetune.run.callbacks import RunCallback

        log, deadline = RunCallback.on_log, time.monotonic() + 900

        def waiting(self, args, state, control, **more):
            log(self, args, state, control, **more)
            while state.global_step == step and not until.exists() and time.monotonic() < deadline:
                time.sleep(0.01)

        RunCallback.on_log = waiting

    return patch


def in_step(number, change):
    """A fault: `change(trainer, loss)` returns the loss of this step's micro-batches, which have had their backward pass."""

    def patch():
        from finetune.run.training import RunTrainer

        real = RunTrainer.training_step

        def step(self, *arguments, **named):
            loss = real(self, *arguments, **named)
            return change(self, loss) if self.state.global_step == number - 1 else loss

        RunTrainer.training_step = step

    return patch


def killed_before_seal(at):
    """A fault that ends the process, as a kill does, in place of the seal of step `at`."""

    def patch():
        import finetune.run.training as training

        real = training.seal

        def seal(folder, target, step, facts):
            return os._exit(137) if step == at else real(folder, target, step, facts)

        training.seal = seal

    return patch


def put_in(phase, what, run):
    import finetune.model.build as own_rows
    from finetune.run.training import RunTrainer

    if phase == "load":
        real = own_rows.load_base

        def load(*arguments, **named):
            once(run, what)
            return real(*arguments, **named)

        own_rows.load_base = load
        return
    name = {"evaluate": "prediction_step", "save": "save_model"}.get(phase, "training_step")
    real_method = getattr(RunTrainer, name)

    def method(self, *arguments, **named):
        if not phase.startswith("step") or self.state.global_step == int(phase[4:]) - 1:
            once(run, what)
        return real_method(self, *arguments, **named)

    setattr(RunTrainer, name, method)
