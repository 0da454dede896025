"""One tool's run for card_peers.py, peers.py, host_time.py and gpu/day.py: `python peer_run.py PEER JOB.json RESULT.json`.

Runs in the tool's environment and imports nothing of this project except for itself (`finetune`). Each tool trains LoRA on all
linear layers through its documented entry point, on all tokens of a "text" column; in NF4 with double quantisation, unless the
job has a `dtype`. `settings` of the job replace the tool's settings; None removes a setting.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))  # where a process was not started with this file
from peer_watch import PROCESS_BEGAN_S, Watch, assume_host_memory, is_out_of_memory  # noqa: E402

QUIET = {
    "TOKENIZERS_PARALLELISM": "false", "HF_HUB_OFFLINE": "1", "WANDB_DISABLED": "true", "AXOLOTL_DO_NOT_TRACK": "1",
    "DO_NOT_TRACK": "1", "UNSLOTH_DISABLE_STATISTICS": "1",
}  # fmt: skip
LINEAR = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
#: Exit status of this project's worker when it is out of memory.
OUT_OF_MEMORY = 5
WORKER_JOB = "worker.json"


def main() -> None:
    """Train and write the figures. The exit status is 0 also for a run that is out of memory."""
    os.environ.update(QUIET)
    if sys.argv[2].endswith(WORKER_JOB):
        from finetune.run.worker import wait_for_run

        wait_for_run()
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


def plan_and_train(job: dict[str, Any]) -> dict[str, Any]:
    """This project: planned as by `finetune run`, then trained in another process, which imports libraries meanwhile."""
    from finetune.card.visible import hide_gpus
    from finetune.run.supervise import worker_environment

    folder = Path(job["folder"])
    files = [str(folder / WORKER_JOB), str(folder / "worker_result.json")]
    command, environment = [sys.executable, __file__, "finetune", *files], worker_environment() | {"PYTHONSAFEPATH": ""}
    worker = subprocess.Popen(command, stdin=subprocess.PIPE, bufsize=0, env=environment)
    hide_gpus()
    assume_host_memory()
    from finetune.recipe import recipe_from
    from finetune.run.card import cards_of, visibility
    from finetune.run.prepare import create_run, prepare
    from finetune.system import send_line

    prepared = prepare(recipe_from({
        "model_name_or_path": job["model"], "dataset": {"path": job["rows"], "test_split_size": 0}, "gpu": "auto",
        "lora_r": job["rank"], "lora_alpha": 2.0 * job["rank"], "load_in_4bit": True, "max_length": job["tokens"],
        "packing": False, "per_device_train_batch_size": job["micro_batch"], "effective_batch_size": job["micro_batch"],
        "max_steps": job["steps"], "eval_steps": 0, "save_steps": 0, "sample_answers": 0, "output_dir": str(folder / "run"),
        **job["settings"],
    }), force=True)  # fmt: skip
    plan, run = prepared.plan, create_run(prepared)
    Path(files[0]).write_text(json.dumps({**job, "run": str(run.path), "began": PROCESS_BEGAN_S}), encoding="utf-8")
    send_line(worker.stdin, {"run": str(run.path), "environment": visibility(cards_of(plan))})
    worker.wait()
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
