"""One peer's run of benchmarks/peers.py, in that peer's own environment: `python peer_run.py PEER JOB.json RESULT.json`.

Imports nothing of this project except for itself (`finetune`). Each peer trains through its own documented entry point; what is
measured is the same for all: transformers' training step, wrapped, and its callbacks.
"""

from __future__ import annotations

import json
import os
import resource
import sys
import time
from pathlib import Path
from typing import Any

os.environ.update(TOKENIZERS_PARALLELISM="false", HF_HUB_OFFLINE="1", WANDB_DISABLED="true", AXOLOTL_DO_NOT_TRACK="1")
PROCESS_BEGAN_S = time.time()


def main() -> None:
    """Train and write the figures."""
    peer, job, result = sys.argv[1], json.loads(Path(sys.argv[2]).read_text(encoding="utf-8")), Path(sys.argv[3])
    import torch

    if not torch.cuda.is_available():
        torch.set_num_threads(1)
    watch = Watch()
    train = {"finetune": train_finetune, "trl": train_trl, "llamafactory": train_llamafactory, "axolotl": train_axolotl}
    train[peer](job, watch)
    result.write_text(json.dumps(watch.figures(peer)), encoding="utf-8")


class Watch:
    """Seconds, tokens and loss of each optimizer step of the next training in this process.

    Seconds are the process's on a processor, where other programs take their share, and those of the clock on a card. Losses
    are per predicted token: older versions of transformers divide by each row's first token, too, which nothing predicts.
    """

    def __init__(self) -> None:
        import torch
        from transformers import Trainer, TrainerCallback

        self.on_cuda = torch.cuda.is_available()
        self.clock = time.perf_counter if self.on_cuda else time.process_time
        self.step_s: list[float] = []
        self.tokens: list[list[Any]] = []
        self.losses: list[float] = []
        self.first_step_s, self.share = 0.0, 1.0
        watch, counted, labelled = self, [0, 0, 0], [0]
        training_step, log = Trainer.training_step, Trainer.log

        def counting(trainer: Any, model: Any, inputs: Any, *more: Any, **named: Any) -> Any:
            ids, labels, mask = inputs["input_ids"], inputs["labels"], inputs.get("attention_mask")
            real = ids.numel() if mask is None else (mask != 0).sum()
            for kind, new in enumerate(((labels[..., 1:] != -100).sum(), real, ids.numel())):
                counted[kind] = counted[kind] + new
            labelled[0] = labelled[0] + (labels[..., 1:] if hasattr(trainer, "_loss_shifts_labels") else labels).ne(-100).sum()
            return training_step(trainer, model, inputs, *more, **named)

        def logging(trainer: Any, logs: Any, *more: Any, **named: Any) -> Any:
            if "loss" in logs:
                watch.losses.append(float(logs["loss"]) * watch.share)
            return log(trainer, logs, *more, **named)

        Trainer.training_step, Trainer.log = counting, logging  # type: ignore[method-assign]

        class Clock(TrainerCallback):
            def on_step_begin(self, *_: Any, **__: Any) -> None:
                self.began = watch.clock()

            def on_step_end(self, *_: Any, **__: Any) -> None:
                if watch.on_cuda:
                    torch.cuda.synchronize()
                watch.step_s.append(watch.clock() - self.began)
                watch.first_step_s = watch.first_step_s or time.time() - PROCESS_BEGAN_S
                watch.tokens.append([int(count) for count in counted])
                watch.share = float(labelled[0] / counted[0])
                counted[:], labelled[0] = [0, 0, 0], 0

        self.callback = Clock()

    def figures(self, peer: str) -> dict[str, Any]:
        """What benchmarks/peers.py reads."""
        from importlib.metadata import version

        import torch

        card = {}
        if self.on_cuda:
            card = {"allocated_bytes": torch.cuda.max_memory_allocated(), "reserved_bytes": torch.cuda.max_memory_reserved()}
        return {
            "version": version(peer), "device": torch.cuda.get_device_name() if self.on_cuda else "cpu",
            "step_s": self.step_s, "tokens": self.tokens, "losses": self.losses, "first_step_s": self.first_step_s,
            "peak_rss_bytes": 1024 * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss, **card,
        }  # fmt: skip


def train_finetune(job: dict[str, Any], watch: Watch) -> None:
    """This project: the prepared run's own worker, with nothing left out."""
    from finetune.run.directory import RunDirectory
    from finetune.run.worker import Worker

    worker = Worker(RunDirectory(Path(job["run"])))
    build = worker._build

    def watched() -> Any:
        trainer, callback = build()
        trainer.add_callback(watch.callback)
        return trainer, callback

    worker._build = watched  # type: ignore[method-assign]
    if worker.main():
        raise SystemExit(1)


def train_trl(job: dict[str, Any], watch: Watch) -> None:
    """TRL's SFTTrainer with its defaults; only bf16 is off on a processor, which may lack it."""
    from datasets import load_dataset
    from peft import LoraConfig
    from trl import SFTConfig, SFTTrainer

    trainer = SFTTrainer(
        model=job["model"],
        args=SFTConfig(
            output_dir=job["folder"], num_train_epochs=1, per_device_train_batch_size=job["batch"], seed=job["seed"],
            learning_rate=job["learning_rate"], lr_scheduler_type="constant", max_length=job["max_length"],
            bf16=watch.on_cuda, use_cpu=not watch.on_cuda, logging_steps=1, save_strategy="no", report_to=[], disable_tqdm=True,
            train_sampling_strategy="sequential",
            model_init_kwargs={"dtype": "bfloat16" if watch.on_cuda else "float32"},
        ),
        train_dataset=load_dataset("json", data_files=job["rows"], split="train"),
        peft_config=LoraConfig(
            r=job["rank"], lora_alpha=2 * job["rank"], target_modules="all-linear", task_type="CAUSAL_LM"
        ),
        callbacks=[watch.callback],
    )  # fmt: skip
    trainer.train()


def train_llamafactory(job: dict[str, Any], watch: Watch) -> None:
    """LLaMA-Factory's trainer of plain text, by a configuration as its examples have it."""
    from llamafactory.train.tuner import run_exp

    rows = Path(job["rows"])
    described = {"rows": {"file_name": rows.name, "columns": {"prompt": "text"}}}
    (rows.parent / "dataset_info.json").write_text(json.dumps(described), encoding="utf-8")
    run_exp({
        "model_name_or_path": job["model"], "stage": "pt", "do_train": True, "finetuning_type": "lora", "lora_target": "all",
        "lora_rank": job["rank"], "lora_alpha": 2 * job["rank"], "lora_dropout": 0.0, "dataset": "rows", "template": "empty",
        "dataset_dir": str(rows.parent), "cutoff_len": job["max_length"], "packing": False, "disable_shuffling": True,
        "output_dir": job["folder"], "overwrite_output_dir": True, "per_device_train_batch_size": job["batch"],
        "gradient_accumulation_steps": 1, "learning_rate": job["learning_rate"], "num_train_epochs": 1.0,
        "lr_scheduler_type": "constant", "logging_steps": 1, "save_strategy": "no", "report_to": "none", "seed": job["seed"],
        "bf16": watch.on_cuda, "use_cpu": not watch.on_cuda, "disable_tqdm": True,
    }, callbacks=[watch.callback])  # fmt: skip


def train_axolotl(job: dict[str, Any], watch: Watch) -> None:
    """Axolotl's training, by a configuration as its examples have it; without CUDA its Triton kernels are off."""
    from axolotl.cli.config import load_cfg
    from axolotl.common.datasets import load_datasets
    from axolotl.train import setup_model_and_trainer
    from axolotl.utils.dict import DictDefault

    rows = {"path": job["rows"], "ds_type": "json", "type": "completion", "field": "text"}
    kernels = {} if watch.on_cuda else dict.fromkeys(("lora_mlp_kernel", "lora_qkv_kernel", "lora_o_kernel"), False)
    cfg = load_cfg(DictDefault({
        "base_model": job["model"], "adapter": "lora", "lora_r": job["rank"], "lora_alpha": 2 * job["rank"],
        "lora_target_linear": True, "datasets": [rows], "shuffle_merged_datasets": False, "curriculum_sampling": True,
        "sequence_len": job["max_length"], "sample_packing": False, "micro_batch_size": job["batch"],
        "gradient_accumulation_steps": 1, "num_epochs": 1, "seed": job["seed"], "learning_rate": job["learning_rate"],
        "lr_scheduler": "constant", "optimizer": "adamw_torch", "logging_steps": 1, "output_dir": job["folder"],
        "save_strategy": "no", "bf16": watch.on_cuda, "val_set_size": 0.0, "dataset_prepared_path": job["folder"] + "/prepared",
        **kernels,
    }))  # fmt: skip
    trainer, *_ = setup_model_and_trainer(cfg, load_datasets(cfg=cfg))
    trainer.add_callback(watch.callback)
    trainer.train()


if __name__ == "__main__":
    main()
