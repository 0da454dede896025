"""Measurements of a tool's training: peaks, times, kernels and the longest row. Imports nothing of this project."""

from __future__ import annotations

import contextlib
import itertools
import os
import resource
import sys
import time
from collections.abc import Callable, Iterator
from typing import Any

#: Host memory that this project may plan with.
HOST_BYTES = 64 * 2**30
#: Lengths are searched to this many tokens, or this share where that is more.
GRAIN_TOKENS, GRAIN_SHARE = 256, 0.02
PROCESS_BEGAN_S = time.time()


def is_out_of_memory(text: str) -> bool:
    """Whether an error's text says that the GPU's memory did not suffice."""
    return "OutOfMemory" in text or "out of memory" in text.lower()


def longest_row(is_possible: Callable[[int], bool], start: int, most: int) -> int:
    """Return the most tokens that fit: doubled until a step runs out of memory, then bisected; all are whole grains."""
    fits, over, tokens = 0, most + GRAIN_TOKENS, min(start, most)
    while over - fits > max(GRAIN_TOKENS, GRAIN_SHARE * fits):
        if is_possible(tokens):
            fits = tokens
        else:
            over = tokens
        middle = (fits + over) // 2 // GRAIN_TOKENS * GRAIN_TOKENS
        tokens = min(2 * fits, most) if over > most else max(middle, fits + GRAIN_TOKENS)
    return fits


def lengthened(inputs: dict[str, Any], tokens: int) -> dict[str, Any]:
    """Return the batch with rows of `tokens`, its values per token repeated."""
    import torch

    length = inputs["input_ids"].shape[-1]
    changed: dict[str, Any] = {}
    for name, value in inputs.items():
        if isinstance(value, torch.Tensor) and value.ndim and value.shape[-1] == length:
            if name == "position_ids":
                changed[name] = torch.arange(tokens, device=value.device, dtype=value.dtype).expand(*value.shape[:-1], tokens)
            else:
                repeated = value.repeat(*[1] * (value.ndim - 1), -(-tokens // length))
                changed[name] = repeated[..., :tokens].contiguous()
        elif isinstance(value, torch.Tensor) and name == "packed_seq_lengths":
            changed[name] = torch.full_like(value, tokens)
        else:
            changed[name] = value
    return changed


class Watch:
    """Peaks of torch's allocators over the whole process, even if a peer resets them; the largest batch, in tokens.

    Further measurements by key of the job:

    - `most_tokens`: after the first step, search for the longest row, with the optimizer's state in memory.
    - `counted`: count the Python calls of the last step but one.
    - `timed`: time synchronised steps. `lengths` adds steps of other lengths, `listed` a table of kernels.
    - `compared`: seconds, tokens and loss of each optimizer step; without a GPU in seconds of the process, not of the clock.
    """

    def __init__(self, job: dict[str, Any]) -> None:
        import torch
        from transformers import Trainer

        self.job, self.on_cuda = job, torch.cuda.is_available()
        if not self.on_cuda:
            torch.set_num_threads(1)
        self.allocated = self.reserved = self.registered = self.batch_tokens = self.steps = self.start_s = 0
        self.processor_s, self.began = list[float](), list[float]()
        self.lengths: dict[int, dict[str, Any]] = {}
        self.kernels, self.calls, self.peaks = "", 0, dict[str, int]()
        self.search: dict[str, Any] = {}
        self.probes: dict[int, tuple[int, int, int]] = {}
        self.compared: dict[str, Any] = {}
        self.reset, self.step = torch.cuda.reset_peak_memory_stats, Trainer.training_step

        def reset_after_reading(*arguments: Any, **named: Any) -> None:
            self.read()
            self.reset(*arguments, **named)

        torch.cuda.reset_peak_memory_stats = reset_after_reading
        Trainer.training_step = lambda *arguments, **named: self.watched_step(*arguments, **named)
        if job.get("compared"):
            self.compare_steps(Trainer)
        if self.on_cuda:
            cudart = torch.cuda.cudart()
            register = cudart.cudaHostRegister

            def counted_register(pointer: int, size: int, flags: int) -> Any:  # pins host memory in place
                self.registered += size
                return register(pointer, size, flags)

            cudart.cudaHostRegister = counted_register

    def watched_step(self, trainer: Any, model: Any, inputs: Any, *more: Any, **named: Any) -> Any:
        """Run a training step with the job's further measurements."""
        import torch
        from torch.profiler import ProfilerActivity, profile

        self.batch_tokens = max(self.batch_tokens, inputs["input_ids"].numel())
        if self.steps == 1 and self.job.get("most_tokens"):
            self.find_longest(trainer, model, inputs, *more, **named)
        self.processor_s.append(time.process_time())
        self.start_s = self.start_s or round(time.time() - self.job.get("began", PROCESS_BEGAN_S), 1)
        if self.job.get("timed"):
            torch.cuda.synchronize()
            self.began.append(time.perf_counter())
        is_counted = self.job.get("counted") and self.steps == self.job["steps"] - 2
        with self.counted_calls() if is_counted else contextlib.nullcontext():
            loss = self.step(trainer, model, inputs, *more, **named)
        self.steps += 1
        if self.steps == self.job["steps"]:
            self.read()
            self.peaks = {"allocated_bytes": self.allocated, "reserved_bytes": self.reserved}
            for tokens in self.job.get("lengths", ()):
                self.lengths[tokens] = self.time_length(trainer, model, lengthened(dict(inputs), tokens), *more, **named)
            if self.job.get("listed"):
                with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as profiler:
                    self.step(trainer, model, dict(inputs), *more, **named)
                    torch.cuda.synchronize()
                by_time = profiler.key_averages().table(sort_by="self_cuda_time_total", row_limit=45, max_name_column_width=90)
                self.kernels = str(by_time)
        return loss

    def compare_steps(self, trainer_class: Any) -> None:
        """Note seconds, tokens (supervised, real, with padding) and loss of each optimizer step.

        Losses are per predicted token: older versions of transformers also divide by each row's first token.
        """
        import torch

        clock = time.perf_counter if self.on_cuda else time.process_time
        step, log, counts, labelled = self.step, trainer_class.log, [0, 0, 0], 0
        began: float | None = None
        figures: dict[str, Any] = {"step_s": [], "tokens": [], "losses": [], "first_step_s": 0.0}
        self.compared = figures

        def counting(trainer: Any, model: Any, inputs: Any, *more: Any, **named: Any) -> Any:
            nonlocal began, labelled
            began = clock() if began is None else began
            ids, labels, mask = inputs["input_ids"], inputs["labels"], inputs.get("attention_mask")
            real = ids.numel() if mask is None else (mask != 0).sum()
            for kind, new in enumerate(((labels[..., 1:] != -100).sum(), real, ids.numel())):
                counts[kind] += int(new)
            labelled += int((labels[..., 1:] if hasattr(trainer, "_loss_shifts_labels") else labels).ne(-100).sum())
            return step(trainer, model, inputs, *more, **named)

        def logging(trainer: Any, logs: Any, *more: Any, **named: Any) -> Any:
            nonlocal began, labelled
            if "loss" in logs and began is not None:  # once after each optimizer step
                if self.on_cuda:
                    torch.cuda.synchronize()
                figures["step_s"].append(clock() - began)
                figures["first_step_s"] = figures["first_step_s"] or time.time() - PROCESS_BEGAN_S
                figures["tokens"].append(list(counts))
                figures["losses"].append(float(logs["loss"]) * labelled / counts[0])
                began, labelled, counts[:] = None, 0, [0, 0, 0]
            return log(trainer, logs, *more, **named)

        self.step, trainer_class.log = counting, logging

    @contextlib.contextmanager
    def counted_calls(self) -> Iterator[None]:
        """Inside, calls of Python and C functions are counted; the backward pass runs in this thread."""
        import torch

        def count(_frame: Any, event: str, _argument: Any) -> None:
            self.calls += event in ("call", "c_call")

        with torch.autograd.set_multithreading_enabled(False):
            sys.setprofile(count)
            try:
                yield
            finally:
                sys.setprofile(None)

    def find_longest(self, trainer: Any, model: Any, inputs: Any, *more: Any, **named: Any) -> None:
        """Search for the longest row that a step can take here."""
        import torch

        def is_possible(tokens: int) -> bool:
            collect(model)
            self.read()
            self.reset()
            try:
                self.step(trainer, model, lengthened(dict(inputs), tokens), *more, **named)
            except Exception as error:  # noqa: BLE001 - libraries raise their own when memory ends
                if not is_out_of_memory(f"{type(error).__name__}: {error}"):
                    raise
                return False
            self.probes[tokens] = (torch.cuda.max_memory_allocated(), torch.cuda.max_memory_reserved(), self.pinned())
            return True

        fits = longest_row(is_possible, self.job.get("start_tokens", 1024), self.job["most_tokens"])
        collect(model)
        sizes = self.probes.get(fits, (0, 0, 0))
        self.search = dict(zip(("allocated_bytes", "reserved_bytes", "host_bytes"), sizes, strict=True), longest_tokens=fits)

    def time_length(self, trainer: Any, model: Any, inputs: Any, *more: Any, **named: Any) -> dict[str, Any]:
        """Seconds of three steps with these inputs, without the optimizer's, and bytes at the peak."""
        import torch

        times: list[float] = []
        try:
            for _ in range(3):
                collect(model)
                self.reset()
                torch.cuda.synchronize()
                began = time.perf_counter()
                self.step(trainer, model, dict(inputs), *more, **named)
                torch.cuda.synchronize()
                times.append(time.perf_counter() - began)
        except Exception as error:  # noqa: BLE001 - a length that does not fit is a result
            return {"failed": f"{type(error).__name__}: {error}"[:200]}
        finally:
            collect(model)
        return {"s": times, "allocated_bytes": torch.cuda.max_memory_allocated()}

    def pinned(self) -> int:
        """Bytes of pinned host memory at the peak so far."""
        import torch

        return self.registered + torch.cuda.host_memory_stats().get("allocated_bytes.peak", 0)

    def read(self) -> None:
        """Take the peaks so far."""
        import torch

        self.allocated = max(self.allocated, torch.cuda.max_memory_allocated())
        self.reserved = max(self.reserved, torch.cuda.max_memory_reserved())

    def figures(self) -> dict[str, Any]:
        """Bytes at the peak; `host_bytes` are pinned."""
        import torch

        device = {"device": torch.cuda.get_device_name() if self.on_cuda else "cpu"}
        rss = {"peak_rss_bytes": 1024 * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss}
        if not self.on_cuda:
            return {**device, **rss, **self.compared}
        self.read()
        return {
            **device, **rss, "allocated_bytes": self.allocated, "reserved_bytes": self.reserved, "host_bytes": self.pinned(),
            "batch_tokens": self.batch_tokens, "steps": self.steps, **self.search,
            "processor_s": [end - start for start, end in itertools.pairwise(self.processor_s)], "calls": self.calls,
            "step_s": [end - start for start, end in itertools.pairwise(self.began)], "lengths": self.lengths,
            "kernels": self.kernels, "start_s": self.start_s,
            "allocator": os.environ.get("PYTORCH_ALLOC_CONF") or os.environ.get("PYTORCH_CUDA_ALLOC_CONF") or "", **self.peaks,
            **self.compared,
        }  # fmt: skip


def collect(model: Any) -> None:
    """Free the leftovers of a step: gradients, cycles, cached blocks of the GPU and of pinned memory."""
    import gc

    import torch

    for parameter in model.parameters():
        parameter.grad = None
    gc.collect()
    torch.cuda.empty_cache()
    torch._C._host_emptyCache()
    torch.cuda.reset_peak_host_memory_stats()


def assume_host_memory() -> None:
    """Have planner and worker assume HOST_BYTES of free host memory; nothing is copied, so its pages are never touched."""
    from finetune.card import card

    card.free_for_run = lambda: HOST_BYTES
