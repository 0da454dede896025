"""Compiled decoder layers: the losses and gradients of eager and lean ones, without graph breaks."""

import functools
import itertools

import pytest
import torch
import torch._dynamo.utils as dynamo
from lean_models import adapter_gradients, error, fill_adapters, save_base
from peft import LoraConfig, inject_adapter_in_model
from tiny_training import RECOMPUTED, adapted, optimizer_of, settings_for
from torch._inductor import config as inductor

from finetune.layers import compiled as compiled_layers
from finetune.layers.compiled import compile_layers, use_operators
from finetune.model.techniques import apply_techniques, step_context

pytestmark = [pytest.mark.slow, pytest.mark.compiler]

#: What is recomputed or kept elsewhere.
FORMS = {"nothing": {}, **RECOMPUTED}
#: (family, whether NF4, rows, dropout, form)
FEW = [
    ("llama", True, "padded", 0.0, "selective"), ("qwen3", False, "packed", 0.1, "every-2"),
    ("gemma3_text", True, "padded", 0.0, "full"),
]  # fmt: skip
ALL = itertools.product(("llama", "qwen3", "gemma3_text"), (False, True), ("padded", "packed"), (0.0, 0.1), FORMS)
#: Each with what makes the code: Inductor takes most of the time.
CASES = [
    (*FEW[0], "inductor"), *((*case, "aot_eager") for case in FEW[1:]),
    *(pytest.param(*case, "inductor", marks=pytest.mark.exhaustive) for case in ALL if case != FEW[0]),
]  # fmt: skip
STEPS = 20


@pytest.fixture
def history(tmp_path):
    """history(way, family, is_nf4, rows, dropout, form) -> losses and adapter gradients of each step in fp32."""

    def run(way, family, is_nf4, rows, dropout, form):
        torch._dynamo.reset()
        dynamo.counters.clear()
        settings = settings_for(
            save_base(tmp_path / family, family), load_in_4bit=is_nf4, lora_dropout=dropout, torch_compile=way == "compiled",
            lean_layers=way == "lean", **FORMS[form],
        )  # fmt: skip
        model = adapted(settings)
        fill_adapters(model)
        model.train()
        apply_techniques(model, settings)
        optimizer, losses, gradients = optimizer_of(model, settings), [], []
        for step in range(STEPS):
            torch.manual_seed(step)
            with step_context(settings, "cpu"):
                loss = model(**batch(rows, step)).loss
                loss.backward()
            losses.append(loss.item())
            gradients.append(adapter_gradients(model))
            optimizer.step()
            optimizer.zero_grad()
        return losses, gradients

    with inductor.patch(fallback_random=True):  # dropout's masks are those of eager layers
        yield run


def batch(rows, step):
    """Two rows of lengths that change from step to step."""
    length = 40 + 8 * (step % 3)
    ids = torch.randint(1, 128, (2, length), generator=torch.Generator().manual_seed(step))
    if rows == "padded":
        mask = torch.ones_like(ids)
        mask[1, -5 - step % 4 :] = 0
        return {"input_ids": ids, "labels": ids.masked_fill(mask == 0, -100), "attention_mask": mask}
    ids, first = ids.reshape(1, -1), 30 + step % 5
    positions = torch.cat([torch.arange(first), torch.arange(2 * length - first)])[None]
    return {"input_ids": ids, "labels": ids, "position_ids": positions}


@pytest.mark.parametrize(("family", "is_nf4", "rows", "dropout", "form", "backend"), CASES)
def test_losses_and_gradients_are_those_of_eager_and_lean_layers(
    history, monkeypatch, family, is_nf4, rows, dropout, form, backend
):
    monkeypatch.setattr(torch, "compile", functools.partial(torch.compile, backend=backend))
    cell = (family, is_nf4, rows, dropout, form)
    losses, gradients = history("compiled", *cell)
    assert not dynamo.counters["graph_break"] and 1 <= dynamo.counters["stats"]["unique_graphs"] <= 3
    for way in ("eager",) if dropout else ("eager", "lean"):
        others, other_gradients = history(way, *cell)
        assert losses == pytest.approx(others, rel=1e-5)
        assert error(gradients[0], other_gradients[0]) <= 1e-5 and error(gradients[-1], other_gradients[-1]) <= 1e-4


class Mixing(torch.nn.Module):
    """As LFM2's short convolution: an adapted linear layer after a transposed copy."""

    def __init__(self):
        super().__init__()
        self.conv, self.project = torch.nn.Conv1d(16, 16, 3, padding=1, groups=16), torch.nn.Linear(16, 16)

    def forward(self, hidden):
        gate = hidden.transpose(1, 2)
        return self.project((gate * self.conv(gate)).transpose(1, 2).contiguous())


def test_gradients_after_a_transposed_copy_are_right():
    torch.manual_seed(0)
    layer = inject_adapter_in_model(LoraConfig(r=4, target_modules=["project"], init_lora_weights=False), Mixing())
    hidden, gradients = torch.randn(2, 24, 16, requires_grad=True), []
    for is_compiled in (False, True):
        if is_compiled:
            use_operators([layer])
            compile_layers([layer])
        with inductor.patch(force_disable_caches=True):  # code of another version's operators could be cached
            layer(hidden).square().sum().backward()
        gradients.append([tensor.grad for tensor in (hidden, *layer.parameters()) if tensor.grad is not None])
        hidden.grad = None
        layer.zero_grad()
    for compiled, eager in zip(*gradients[::-1], strict=True):
        torch.testing.assert_close(compiled, eager)


@pytest.mark.exhaustive
def test_an_operator_that_is_wrong_by_a_thousandth_is_noticed(history, monkeypatch):
    right, product = history("eager", *FEW[0]), compiled_layers.scaled_product
    monkeypatch.setattr(compiled_layers, "scaled_product", lambda left, right, scale: product(left, right, 1.001 * scale))
    losses, gradients = history("compiled", *FEW[0])
    assert losses != pytest.approx(right[0], rel=1e-5) and error(gradients[0], right[1][0]) > 1e-5


def test_few_guards_still_see_adapters_switched_off_and_another_model(tmp_path, monkeypatch):
    monkeypatch.setattr(torch, "compile", functools.partial(torch.compile, backend="aot_eager"))
    settings = settings_for(save_base(tmp_path / "llama", "llama"), target_modules=["q_proj", "down_proj"])
    model = adapted(settings)
    fill_adapters(model)
    model.train()

    def loss():
        with model.disable_adapter():
            off = model(**batch("padded", 0)).loss
        return model(**batch("padded", 0)).loss.item(), off.item()

    eager = loss()
    apply_techniques(model, settings.model_copy(update={"torch_compile": True}))
    assert loss() == pytest.approx(eager, rel=1e-5) and eager[0] != pytest.approx(eager[1], rel=1e-4)
