"""A real run on the CPU, by the worker itself, with its memory tracked phase by phase; and the dry run of the same plan."""

import json
import signal
from contextlib import ExitStack
from dataclasses import replace
from functools import wraps
from pathlib import Path

import bitsandbytes.functional
import bitsandbytes.nn
import pytest
import torch
from tiny_models import config_values
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils._pytree import tree_iter

import finetune.layers.host_memory
import finetune.layers.lean_layers
import finetune.layers.offload
import finetune.model.build
import finetune.model.techniques
from finetune.memory.caching_allocator import rounded
from finetune.memory.depth import AUXILIARY
from finetune.memory.forecast import RowShape
from finetune.memory.ledger import batch_of
from finetune.memory.simulate import garbage_collection_paused, observe, simulate
from finetune.memory.tracker import StorageTracker
from finetune.model.transformers_config import load_config
from finetune.recipe import recipe_from

PHASES = ("load", "forward", "loss", "loss backward", "backward", "optimizer", "save", "eval")
#: Tensors that the run holds and the dry run does not: micro-batches that wait for their turn (24 bytes a token), step counts,
#: positions and counts of tokens. 0.5 % of these small models are few bytes.
WAITING_BYTES = 16 * 1024
#: Tokens of the longest rows and of a pack.
TOKENS = 128
WORDS = 200


def save_model(kind: str, folder: Path) -> str:
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedTokenizerFast

    torch.manual_seed(0)
    many = {"num_experts": 32, "num_experts_per_tok": 4, "moe_intermediate_size": 32} if kind == "qwen3_moe" else {}
    values = config_values(kind, num_hidden_layers=3, vocab_size=2048, **many)
    config = AutoConfig.for_model(values.pop("model_type"), **values)
    AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).save_pretrained(folder)
    vocabulary = {"<pad>": 0, "<bos>": 1, "<eos>": 2} | {f"w{number}": number for number in range(3, WORDS)}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, "<pad>"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, pad_token="<pad>", eos_token="<eos>").save_pretrained(folder)
    return str(folder)


def save_rows(path: Path, lengths: tuple[int, ...], count: int, method: str = "sft") -> str:
    """Rows of a training method that have, with EOS, these numbers of tokens by turns."""
    texts = [
        " ".join(f"w{3 + (row + at) % (WORDS - 3)}" for at in range(lengths[row % len(lengths)] - 1)) for row in range(count)
    ]
    make = {"sft": lambda text: {"text": text}, "dpo": _pair_of, "kto": _labelled_of}[method]
    path.write_text("".join(json.dumps(make(text)) + "\n" for text in texts))
    return str(path)


def _pair_of(text: str) -> dict[str, str]:
    """Two answers to a prompt of one word; the rejected one is shorter, so that a batch is padded."""
    prompt, *answer = text.split(" ")
    return {"prompt": prompt, "chosen": " " + " ".join(answer), "rejected": " " + " ".join(reversed(answer[1:]))}


def _labelled_of(text: str) -> dict[str, object]:
    """An answer to a prompt of one word, good if that has an odd number; a bad one is shorter, so that a batch is padded."""
    prompt, *answer = text.split(" ")
    good = int(prompt[1:]) % 2 == 1
    return {"prompt": prompt, "completion": " " + " ".join(answer[0 if good else 1 :]), "label": good}


def planned(model: str, folder: Path, lengths: tuple[int, ...] = (TOKENS, TOKENS), **more):
    """The run directory of a small recipe, and its plan."""
    from finetune.run.prepare import create_run, prepare

    method = more.get("method", "sft")
    rows = save_rows(folder / "rows.jsonl", lengths, 8, method)
    held_out = save_rows(folder / "held-out.jsonl", (TOKENS, TOKENS), 2, method)
    recipe = recipe_from(
        {
            "model_name_or_path": model, "dataset": {"path": rows, "eval_path": held_out}, "gpu": "cpu", "dtype": "bfloat16",
            "attn_implementation": "sdpa", "max_length": TOKENS, "packing": False, "load_in_4bit": False, "load_in_8bit": False,
            "lora_r": 8, "lora_alpha": 16, "target_modules": "all-linear", "per_device_train_batch_size": 1,
            "gradient_accumulation_steps": 2, "effective_batch_size": "auto", "max_steps": 2, "learning_rate": 1e-3,
            "optim": "adamw_torch", "activation_checkpointing": False, "activation_checkpointing_every_n_layers": 1,
            "eval_steps": 2, "per_device_eval_batch_size": 1, "save_steps": 2, "sample_answers": 0,
            "output_dir": str(folder / "run"), **more,
        }
    )  # fmt: skip
    prepared = prepare(recipe)
    return create_run(prepared), prepared.plan


def forecast(plan) -> dict[str, int]:
    """Peak bytes of each phase of the plan's dry run at full depth."""
    settings = plan.settings
    batch = batch_of(settings, RowShape(settings.max_length))
    if settings.packing:
        batch = replace(batch, documents=2, held_out=replace(batch.held_out, documents=2))
    return by_phase(simulate(load_config(settings), settings, batch, None))


def by_phase(tracked) -> dict[str, int]:
    peaks: dict[str, int] = {}
    for (phase, _), peak in tracked.peaks.items():
        phase = {AUXILIARY: "loss", "adapters": "load", "casts": "load"}.get(phase, phase)  # in a real run these are one
        peaks[phase] = max(peaks.get(phase, 0), peak.total())
    return peaks


def assert_close(expected: dict[str, int], seen: dict[str, int], sequences: int = 1) -> None:
    """Every phase is within 0.5 %, or what waits for `sequences` sequences of a micro-batch."""
    far = {
        phase: (expected[phase], seen[phase])
        for phase in PHASES
        if abs(expected[phase] - seen[phase]) > max(0.005 * seen[phase], WAITING_BYTES * sequences)
    }
    assert far == {}


class RealTracker(StorageTracker):
    """Sees tensors that no operator made, such as those read from a file, when they are first used."""

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        for leaf in tree_iter((args, kwargs)):
            if isinstance(leaf, torch.Tensor):
                self.track(leaf)
        return super().__torch_dispatch__(func, types, args, kwargs)

    on_host = False

    def track(self, tensor, *, layer=None):
        if isinstance(tensor, FakeTensor):  # of code that tries a layer without its values
            return
        super().track(tensor, layer=layer)
        key = tensor.untyped_storage()._cdata
        size, tag = self._sizes[key]
        if self.on_host and size:
            self._released(key)
            self._sizes[key] = (0, tag)

    def size_of(self, tensor) -> int | None:
        """Bytes that a tensor counts with: 0 in host memory, None when it has not been seen."""
        return self._sizes.get(tensor.untyped_storage()._cdata, (None,))[0]

    def arrives(self, tensor):
        """Count a tensor from now on, also one that was made as host memory."""
        self.track(tensor)
        key = tensor.untyped_storage()._cdata
        size, tag = self._sizes[key]
        if size == 0:
            size = rounded(tensor.untyped_storage().nbytes())
            self._sizes[key] = (size, tag)
            self.live_bytes += size
            self.live[tag] += size

    def host_memory_of(self, function):
        """The function, whose new tensors are never counted."""

        @wraps(function)
        def on_host(*arguments, **named):
            before, self.on_host = self.on_host, True
            try:
                return function(*arguments, **named)
            finally:
                self.on_host = before

        return on_host


def separate_host_memory(tracker: RealTracker, patch: pytest.MonkeyPatch) -> None:
    """Don't count what is in host memory also when a card trains; on a CPU it can't be told from the rest.

    That is what the project moves there, the small values that layers are recognised by, and what bitsandbytes saves beside
    each quantised weight. A batch with pictures counts once its step begins: on a GPU the next one waits in host memory, where
    the pictures' values are counted, too.
    """
    from finetune.run.training import PictureCollator, RunTrainer

    for home, name in (
        (finetune.layers.offload, "host_empty"), (finetune.model.techniques, "host_empty"),
        (finetune.layers.host_memory, "host_empty"), (finetune.layers.host_memory, "host_buffer"),
        (finetune.layers.lean_layers, "_computes_norm"), (bitsandbytes.functional, "pack_dict_to_tensor"),
        (bitsandbytes.nn.Linear8bitLt, "_save_to_state_dict"),
        (PictureCollator, "__call__"), (RunTrainer, "_get_train_sampler"),
    ):  # fmt: skip
        patch.setattr(home, name, tracker.host_memory_of(getattr(home, name)))
    compute = RunTrainer.compute_loss

    def arriving(self, model, inputs, *arguments, **named):
        for value in inputs.values():
            if isinstance(value, torch.Tensor):
                tracker.arrives(value)
        return compute(self, model, inputs, *arguments, **named)

    patch.setattr(RunTrainer, "compute_loss", arriving)


def count_weights_when_loaded(tracker: RealTracker, patch: pytest.MonkeyPatch) -> None:
    """Also those that no operator has read yet."""
    loaded = finetune.model.build.build_base

    def build_base(*arguments, **named):
        model = loaded(*arguments, **named)
        for tensor in (*model.parameters(), *model.buffers()):
            tracker.arrives(tensor)
        tracker.record()
        return model

    patch.setattr(finetune.model.build, "build_base", build_base)


def merge_experts_on_host(tracker: RealTracker, patch: pytest.MonkeyPatch) -> None:
    """Experts that are made 4-bit are merged in uncounted host memory, and counted once they are on the card."""
    from transformers.core_model_loading import Concatenate, MergeModulelist
    from transformers.integrations.bitsandbytes import Bnb4bitQuantize
    from transformers.integrations.mxfp4 import Mxfp4Dequantize

    quantise = Bnb4bitQuantize.convert

    def convert(operation, values, *arguments, **named):
        for name, value in values.items():
            if isinstance(value, torch.Tensor) and tracker.size_of(value) == 0:
                values[name] = value.clone()
        return quantise(operation, values, *arguments, **named)

    for kind in (Concatenate, MergeModulelist, Mxfp4Dequantize):
        patch.setattr(kind, "convert", tracker.host_memory_of(kind.convert))
    patch.setattr(Bnb4bitQuantize, "convert", convert)


def watch(trainer, tracker: RealTracker) -> None:
    """Tell the tracker the phase, at the same places as in the dry run."""

    def around(name, before, after):
        inner = getattr(trainer, name)

        @wraps(inner)
        def method(*arguments, **named):
            enter(before)
            try:
                return inner(*arguments, **named)
            finally:
                enter(after)

        setattr(trainer, name, method)

    def enter(phase):
        if callable(phase):
            phase = phase()
        tracker.phase, tracker.layer = phase, None

    def training():
        return "forward" if trainer.model.training else "eval"

    around("compute_loss", training, lambda: "loss backward" if trainer.model.training else "eval")
    around("training_step", "fetch", "optimizer")
    around("_save_checkpoint", "save", "fetch")
    around("evaluate", "eval", "fetch")
    observe(trainer.model, tracker)


def measured(run) -> dict[str, int]:
    """Peak bytes of each phase of a run that the worker makes in this process."""
    from finetune.run.worker import Worker

    tracker, handlers = RealTracker(), {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)}
    with ExitStack() as stack, pytest.MonkeyPatch.context() as patch:
        stack.callback(lambda: [signal.signal(number, handler) for number, handler in handlers.items()])
        stack.enter_context(garbage_collection_paused())
        for change in (separate_host_memory, count_weights_when_loaded):
            change(tracker, patch)
        stack.enter_context(tracker)
        worker = Worker(run)
        if worker.plan.settings.load_in_4bit:
            merge_experts_on_host(tracker, patch)
        trainer, _ = worker._build_trainer()
        for tensor in (*trainer.model.parameters(), *trainer.model.buffers()):
            tracker.track(tensor)
        watch(trainer, tracker)
        trainer.train()
        trainer.finish_sealing()
    return by_phase(tracker)
