"""How often the host reads a number from the device, and so waits for it, in each micro-batch and in each step; how many
kernels update the adapters."""

import functools

import pytest
from conftest import adapter_hash

pytestmark = pytest.mark.slow
SHORT = ("max_steps=3", "effective_batch_size=4", "per_device_train_batch_size=2")


def count_reads(run):
    """A fault that notes how many numbers are read, and how many fused updates run: in each micro-batch, in the counts of a
    step's tokens and in each update of the adapters."""

    def put_in():
        import torch
        from torch.utils._python_dispatch import TorchDispatchMode

        from finetune.run.training import RunTrainer

        class Reads(TorchDispatchMode):
            count = fused = 0

            def __torch_dispatch__(self, func, types, args=(), kwargs=None):
                self.count += func is torch.ops.aten._local_scalar_dense.default
                self.fused += func is torch.ops.aten._fused_adamw_.default
                return func(*args, **(kwargs or {}))

        step, take = RunTrainer.training_step, RunTrainer.take_counts

        def watched(name, function):
            @functools.wraps(function)
            def counted(self, *arguments, **named):
                with Reads() as reads:
                    out = function(self, *arguments, **named)
                with (run.path / name).open("a") as file:
                    file.write(f"{reads.count} {reads.fused}\n")
                return out

            return counted

        RunTrainer.training_step, RunTrainer.take_counts = watched("micro", step), watched("tokens", take)
        torch.optim.AdamW.step = watched("update", torch.optim.AdamW.step)

    return put_in


def counts(run, name):
    """(numbers read, fused updates) of each time."""
    return [tuple(map(int, line.split())) for line in (run.path / name).read_text().splitlines()]


@pytest.mark.parametrize(("packing", "reads"), [("false", 0), ("true", 1)])
def test_a_micro_batch_reads_no_number_from_the_device_unless_rows_are_packed(make_run, train, packing, reads):
    """Whether its positions are those of packed rows. TRL reads five more."""
    run = make_run(*SHORT, f"packing={packing}", "optim=adamw_torch_fused")
    assert train(run, count_reads(run)) == 0, run.log.read_text()[-2000:]
    assert {read for read, _ in counts(run, "micro")} == {reads} and len(counts(run, "micro")) >= 3
    assert max(counts(run, "tokens")) == (0, 0)  # all counts are copied at once
    assert counts(run, "update") == [(0, 1)] * 3  # one kernel for all adapters


def test_the_loss_is_trls_to_the_bit(make_run, train):
    def with_trls():
        import torch
        from trl import SFTTrainer

        from finetune.model.padding import without_mask
        from finetune.run.training import RunTrainer

        def compute_loss(self, model, inputs, *arguments, **named):
            self._counts["correct"] += 0
            positions = torch.arange(inputs["input_ids"].shape[1])[None]  # TRL counts tokens by these or by the mask
            return SFTTrainer.compute_loss(self, model, without_mask(inputs) | {"position_ids": positions}, *arguments, **named)

        RunTrainer.compute_loss = compute_loss

    ours, theirs = make_run(*SHORT), make_run(*SHORT)
    assert train(ours) == 0 and train(theirs, with_trls) == 0, ours.log.read_text()[-2000:]
    assert adapter_hash(ours) == adapter_hash(theirs)
