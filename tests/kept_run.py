"""Make a run for tests: python tests/kept_run.py RUN. Named `stopped` it stops after two of its six steps, else it finishes."""

import os
import signal
import sys
from pathlib import Path

from finetune.bundled import dataset_paths
from finetune.recipe import load_recipe
from finetune.run.directory import RunDirectory
from finetune.run.prepare import create_run, prepare
from finetune.run.training import RunTrainer
from finetune.run.worker import Worker

RECIPE = """\
model_name_or_path: tiny
dtype: float32
dataset: {path: rows.jsonl, eval_path: held_out.jsonl}
max_length: 256
packing: false
load_in_4bit: false
lora_r: 1
lora_alpha: 2
target_modules: [q_proj, v_proj]
effective_batch_size: 8
per_device_train_batch_size: 4
max_steps: 6
learning_rate: 0.004
optim: adamw_torch
activation_checkpointing: false
gpu: cpu
eval_steps: 3
sample_answers: 1
save_steps: 2
save_total_limit: 1
"""


def make(run: Path) -> int:
    """Train in this process, where a fault can be put in; return the worker's exit status."""
    for part, name, count in (("train", "rows", 24), ("eval", "held_out", 6)):
        rows = dataset_paths("support")[part].read_text(encoding="utf-8").splitlines(keepends=True)
        (run.parent / f"{name}.jsonl").write_text("".join(rows[:count]), encoding="utf-8")
    recipe = run.parent / f"{run.name}.yaml"
    recipe.write_text(RECIPE, encoding="utf-8")
    os.chdir(run.parent)
    create_run(prepare(load_recipe(str(recipe), [f"output_dir={run}"])))
    if run.name == "stopped":
        RunTrainer.training_step = stop_in_second_step(RunTrainer.training_step)
    return Worker(RunDirectory(run)).main()


def stop_in_second_step(training_step):
    """A second signal would end the process at once, so only the step's first micro-batch sends one."""
    sent = []

    def step(self, *arguments, **named):
        if self.state.global_step == 1 and not sent:
            sent.append(os.kill(os.getpid(), signal.SIGINT))
        return training_step(self, *arguments, **named)

    return step


if __name__ == "__main__":
    sys.exit(make(Path(sys.argv[1])))
