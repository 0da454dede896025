"""One tool's run for card_peers.py, peers.py, host_time.py and gpu/day.py: `python peer_run.py PEER JOB.json RESULT.json`.

Runs in the tool's environment and imports nothing of this project except for itself (`finetune`). Each tool trains LoRA on all
linear layers through its documented entry point, on all tokens of a "text" column; in NF4 with double quantisation, unless the
job has a `dtype`. `settings` of the job replace the tool's settings; None removes a setting.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import resource
import subprocess
import sys
import time
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

QUIET = {
    "TOKENIZERS_PARALLELISM": "false", "HF_HUB_OFFLINE": "1", "WANDB_DISABLED": "true", "AXOLOTL_DO_NOT_TRACK": "1",
    "DO_NOT_TRACK": "1", "UNSLOTH_DISABLE_STATISTICS": "1",
}  # fmt: skip
LINEAR = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
#: Exit status of this project's worker when it is out of memory.
OUT_OF_MEMORY = 5
#: Host memory that this project may plan with.
HOST_BYTES = 64 * 2**30
#: Lengths are searched to this many tokens, or this share where that is more.
GRAIN_TOKENS, GRAIN_SHARE = 256, 0.02
PROCESS_BEGAN_S = time.time()


def main() -> None:
    """Train and write the figures. The exit status is 0 also for a run that is out of memory."""
    os.environ.update(QUIET)
    peer, job, result = sys.argv[1], json.loads(Path(sys.argv[2]).read_text(encoding="utf-8")), Path(sys.argv[3])
    train = {
        "finetune": train_worker if "run" in job else plan_and_train, "trl": train_trl, "unsloth": train_unsloth,
        "llamafactory": train_llamafactory, "axolotl": train_axolotl,
    }[peer]  # fmt: skip
    figures = {"version": version_of(peer), "torch": version_of("torch"), "out_of_memory": False}
    try:
        figures |= train(job)
    except Exception as error:  # noqa: BLE001 - any failure of a peer is a result
        figures |= failure(error)
    result.write_text(json.dumps(figures), encoding="utf-8")
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)  # threads of a peer may wait for ever


def version_of(package: str) -> str:
    """Version of an installed package; this project's own where it runs from its folder."""
    from importlib.metadata import PackageNotFoundError, version

    try:
        return version(package)
    except PackageNotFoundError:
        import finetune

        return finetune.__version__


def failure(error: Exception) -> dict[str, Any]:
    """Why a run has failed."""
    traceback.print_exc()
    text = f"{type(error).__name__}: {error}"
    return {"out_of_memory": is_out_of_memory(text), "failed": " ".join(text.split())[:300]}


def is_out_of_memory(text: str) -> bool:
    """Whether an error's text says that the GPU's memory did not suffice."""
    return "OutOfMemory" in text or "out of memory" in text.lower()


def longest_row(peak_of: Callable[[int], int | None], limit: int, start: int, most: int) -> int:
    """Return the most tokens that fit, by probes that approach from below, then by bisection.

    `peak_of`: peak bytes of a step with this number of tokens, None if out of memory. `limit`: available bytes.
    """
    peaks: dict[int, int] = {}
    fits, over = 0, most + GRAIN_TOKENS
    tokens = min(start, most)
    while tokens > fits:
        peak = peak_of(tokens)
        if peak is None:
            over = tokens
        else:
            fits, peaks[tokens] = tokens, peak
        tokens = next_length(peaks, fits, over, limit)
    return fits


def next_length(peaks: dict[int, int], fits: int, over: int, limit: int) -> int:
    """Return the next length to try between `fits` and `over`; `fits` if they are closer than the grain.

    A line through the last two peaks says where memory ends, and a tenth of the way there is left.
    """
    grain = max(GRAIN_TOKENS, round(GRAIN_SHARE * fits) // GRAIN_TOKENS * GRAIN_TOKENS)
    if over - fits <= grain:
        return fits
    last_two = sorted(peaks)[-2:]
    guess = 2 * fits if fits else over // 2
    if len(last_two) == 2 and peaks[last_two[1]] > peaks[last_two[0]]:
        slope = (peaks[last_two[1]] - peaks[last_two[0]]) / (last_two[1] - last_two[0])
        guess = fits + round(0.9 * (limit - peaks[fits]) / slope)
    if over - guess < grain:
        guess = (fits + over) // 2
    guess = guess // GRAIN_TOKENS * GRAIN_TOKENS
    return min(max(guess, fits + grain), over - GRAIN_TOKENS)


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
        self.allocated = self.reserved = self.registered = self.batch_tokens = self.steps = 0
        self.processor_s: list[float] = []
        self.began: list[float] = []
        self.lengths: dict[int, dict[str, Any]] = {}
        self.kernels, self.peaks = "", dict[str, int]()
        self.calls = 0
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
            self.count_registered(torch.cuda.cudart())

    def count_registered(self, cudart: Any) -> None:
        """Count the bytes of host memory that are pinned in place."""
        register = cudart.cudaHostRegister

        def counted_register(pointer: int, size: int, flags: int) -> Any:
            self.registered += size
            return register(pointer, size, flags)

        cudart.cudaHostRegister = counted_register

    def watched_step(self, trainer: Any, model: Any, inputs: Any, *more: Any, **named: Any) -> Any:
        """Run a training step with the job's further measurements."""
        import torch

        self.batch_tokens = max(self.batch_tokens, inputs["input_ids"].numel())
        if self.steps == 1 and self.job.get("most_tokens"):
            self.find_longest(trainer, model, inputs, *more, **named)
        self.processor_s.append(time.process_time())
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
                self.kernels = self.list_kernels(lambda: self.step(trainer, model, dict(inputs), *more, **named))
        return loss

    def compare_steps(self, trainer_class: Any) -> None:
        """Note seconds, tokens (supervised, real, with padding) and loss of each optimizer step.

        Losses are per predicted token: older versions of transformers divide by each row's first token, too, which nothing
        predicts.
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

        def peak_of(tokens: int) -> int | None:
            collect(model)
            self.read()
            self.reset()
            try:
                self.step(trainer, model, lengthened(dict(inputs), tokens), *more, **named)
                peak: int | None = torch.cuda.max_memory_allocated()
                self.probes[tokens] = (peak or 0, torch.cuda.max_memory_reserved(), self.pinned())
            except Exception as error:  # noqa: BLE001 - libraries raise their own when memory ends
                if not is_out_of_memory(f"{type(error).__name__}: {error}"):
                    raise
                peak = None
            print(f"probe {tokens}: {peak}", flush=True)
            return peak

        limit = torch.cuda.mem_get_info()[0] + torch.cuda.memory_reserved()
        fits = longest_row(peak_of, limit, self.job.get("start_tokens", 1024), self.job["most_tokens"])
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

    def list_kernels(self, run: Callable[[], Any]) -> str:
        """The kernels of a step by their time."""
        import torch
        from torch.profiler import ProfilerActivity, profile

        with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as profiler:
            run()
            torch.cuda.synchronize()
        return str(profiler.key_averages().table(sort_by="self_cuda_time_total", row_limit=45, max_name_column_width=90))

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
            "kernels": self.kernels,
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
    from finetune.card import host

    host.free_for_run = lambda: HOST_BYTES


def plan_and_train(job: dict[str, Any]) -> dict[str, Any]:
    """This project: planned as by `finetune run`, then trained by the worker in another process."""
    from finetune.card.visible import hide_gpus

    hide_gpus()
    assume_host_memory()
    from finetune.recipe import recipe_from
    from finetune.run.card import cards_of
    from finetune.run.prepare import create_run, prepare
    from finetune.run.supervise import worker_environment

    folder = Path(job["folder"])
    prepared = prepare(recipe_from({
        "model_name_or_path": job["model"], "dataset": {"path": job["rows"], "test_split_size": 0}, "gpu": "auto",
        "lora_r": job["rank"], "lora_alpha": 2.0 * job["rank"], "load_in_4bit": True, "max_length": job["tokens"],
        "packing": False, "per_device_train_batch_size": job["micro_batch"], "effective_batch_size": job["micro_batch"],
        "max_steps": job["steps"], "eval_steps": 0, "save_steps": 0, "sample_answers": 0, "output_dir": str(folder / "run"),
        **job["settings"],
    }), force=True)  # fmt: skip
    plan, run = prepared.plan, create_run(prepared)
    environment = worker_environment(cards_of(plan))
    environment.pop("PYTHONSAFEPATH", None)
    (folder / "worker.json").write_text(json.dumps({**job, "run": str(run.path)}), encoding="utf-8")
    files = [str(folder / "worker.json"), str(folder / "worker_result.json")]
    subprocess.run([sys.executable, __file__, "finetune", *files], env=environment, check=False)
    figures = json.loads(Path(files[1]).read_text(encoding="utf-8"))
    forecast_bytes = max(plan.forecast.peaks.values()) if plan.forecast else None
    return {**figures, "plan": plan.as_json()["plan"], "verdict": plan.verdict.value, "forecast_bytes": forecast_bytes}


def train_worker(job: dict[str, Any]) -> dict[str, Any]:
    """The worker of a planned run of this project."""
    watch = Watch(job)
    if not job.get("compared"):
        assume_host_memory()
    from finetune.run.directory import RunDirectory
    from finetune.run.worker import Worker

    run = RunDirectory(Path(job["run"]))
    code = Worker(run).main()
    lines = [json.loads(line) for line in run.events.read_text(encoding="utf-8").splitlines()]
    compiled = [{name: line[name] for name in ("graphs", "graph_breaks", "compile_s")} for line in lines if "compile_s" in line]
    failed = {"failed": f"the worker ended with {code}"} if code else {}
    return {**watch.figures(), "out_of_memory": code == OUT_OF_MEMORY, **failed, **(compiled[-1] if compiled else {})}


def trained(train: Callable[[], Any], watch: Watch) -> dict[str, Any]:
    """Return the figures of a training, even if it runs out of memory."""
    try:
        train()
    except Exception as error:  # noqa: BLE001 - peaks of a failed run are figures, too
        return {**watch.figures(), **failure(error)}
    return watch.figures()


def configured(job: dict[str, Any], **values: Any) -> dict[str, Any]:
    """Return a tool's settings, replaced by the job's settings; None removes a setting."""
    return {name: value for name, value in (values | job["settings"]).items() if value is not None}


def rows_of(job: dict[str, Any]) -> Any:
    """The rows as a dataset."""
    from datasets import load_dataset

    return load_dataset("json", data_files=job["rows"], split="train")


def sft_settings(job: dict[str, Any], **more: Any) -> dict[str, Any]:
    """Return the settings of TRL's trainer, which Unsloth uses, too."""
    return configured(
        job, output_dir=job["folder"], max_steps=job["steps"], per_device_train_batch_size=job["micro_batch"],
        gradient_accumulation_steps=1, max_length=job["tokens"], bf16=True, logging_steps=1, save_strategy="no",
        report_to="none", disable_tqdm=True, **more,
    )  # fmt: skip


def train_trl(job: dict[str, Any]) -> dict[str, Any]:
    """TRL's SFTTrainer with its defaults."""
    watch = Watch(job)
    import torch
    from peft import LoraConfig
    from transformers import BitsAndBytesConfig
    from trl import SFTConfig, SFTTrainer

    nf4 = BitsAndBytesConfig(
        load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_use_double_quant=True, bnb_4bit_compute_dtype=torch.bfloat16
    )
    loading = {"dtype": job["dtype"]} if "dtype" in job else {"dtype": "bfloat16", "quantization_config": nf4}
    trainer = SFTTrainer(
        model=job["model"],
        args=SFTConfig(model_init_kwargs=loading, **sft_settings(job)),
        train_dataset=rows_of(job),
        peft_config=LoraConfig(
            r=job["rank"], lora_alpha=2 * job["rank"], target_modules="all-linear", task_type="CAUSAL_LM"
        ),
    )  # fmt: skip
    return trained(trainer.train, watch)


def train_unsloth(job: dict[str, Any]) -> dict[str, Any]:
    """Unsloth as its notebooks have it: its own checkpointing and 8-bit Adam.

    Rows are cut to `max_seq_length`; embeddings move to host memory if a row of this length would be tight.
    """
    import unsloth  # noqa: F401, I001 - before transformers, which it patches
    from unsloth import FastLanguageModel

    watch = Watch(job)
    from trl import SFTConfig, SFTTrainer

    checkpointing = job["settings"].pop("use_gradient_checkpointing", "unsloth")
    model, tokenizer = FastLanguageModel.from_pretrained(
        model_name=job["model"], max_seq_length=job.get("most_tokens") or job["tokens"], load_in_4bit=True
    )
    model = FastLanguageModel.get_peft_model(
        model, r=job["rank"], lora_alpha=2 * job["rank"], lora_dropout=0, bias="none", target_modules=LINEAR,
        use_gradient_checkpointing=checkpointing, random_state=42,
    )  # fmt: skip
    arguments = SFTConfig(**sft_settings(job, optim="adamw_8bit"))
    trainer = SFTTrainer(model=model, processing_class=tokenizer, train_dataset=rows_of(job), args=arguments)
    return trained(trainer.train, watch)


def train_llamafactory(job: dict[str, Any]) -> dict[str, Any]:
    """LLaMA-Factory's trainer of plain text, by a configuration as its examples have it."""
    watch = Watch(job)
    from llamafactory.train.tuner import run_exp

    rows = Path(job["rows"])
    described = {"rows": {"file_name": rows.name, "columns": {"prompt": "text"}}}
    (rows.parent / "dataset_info.json").write_text(json.dumps(described), encoding="utf-8")
    nf4 = {} if "dtype" in job else {"quantization_bit": 4, "quantization_method": "bnb"}
    configuration = configured(
        job, model_name_or_path=job["model"], stage="pt", do_train=True, finetuning_type="lora", lora_target="all",
        lora_rank=job["rank"], lora_alpha=2 * job["rank"], lora_dropout=0.0, dataset="rows", template="empty", **nf4,
        dataset_dir=str(rows.parent), cutoff_len=job["tokens"], packing=False, output_dir=job["folder"],
        overwrite_output_dir=True, max_steps=job["steps"], per_device_train_batch_size=job["micro_batch"],
        gradient_accumulation_steps=1, logging_steps=1, save_strategy="no", report_to="none", bf16=True, disable_tqdm=True,
    )  # fmt: skip
    return trained(lambda: run_exp(configuration), watch)


def train_axolotl(job: dict[str, Any]) -> dict[str, Any]:
    """Axolotl's training, by a configuration as its examples have it."""
    watch = Watch(job)
    from axolotl.cli.config import load_cfg
    from axolotl.common.datasets import load_datasets
    from axolotl.train import setup_model_and_trainer
    from axolotl.utils.dict import DictDefault

    rows = {"path": job["rows"], "ds_type": "json", "type": "completion", "field": "text"}
    kind = {"adapter": "lora"} if "dtype" in job else {"adapter": "qlora", "load_in_4bit": True}
    cfg = load_cfg(DictDefault(configured(
        job, base_model=job["model"], lora_r=job["rank"], lora_alpha=2 * job["rank"], lora_target_linear=True, datasets=[rows],
        sequence_len=job["tokens"], sample_packing=False, micro_batch_size=job["micro_batch"], gradient_accumulation_steps=1,
        max_steps=job["steps"], learning_rate=2e-4, lr_scheduler="cosine", optimizer="paged_adamw_32bit", logging_steps=1,
        output_dir=job["folder"], save_strategy="no", bf16=True, val_set_size=0.0,
        dataset_prepared_path=job["folder"] + "/prepared", **kind,
    )))  # fmt: skip
    trainer, *_ = setup_model_and_trainer(cfg, load_datasets(cfg=cfg))
    return trained(trainer.train, watch)


if __name__ == "__main__":
    main()
