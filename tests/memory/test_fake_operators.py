"""Memoised fake-tensor outputs equal torch's, and share the same storages."""

import pytest
import torch
from tiny_models import TYPES, config_values, settings
from torch._subclasses.fake_tensor import DynamicOutputShapeException, FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from finetune.memory import fake_operators
from finetune.memory.forecast import Batch
from finetune.memory.simulate import simulate
from finetune.model.transformers_config import config_from

TECHNIQUES = [{}, {"use_dora": True}, {"load_in_4bit": False, "load_in_8bit": True}, {"optim": "adafactor"}]
#: PEFT has no DoRA for experts.
EVERY = [
    (kind, more) for kind in TYPES for more in TECHNIQUES if kind not in ("mixtral", "qwen3_moe") or "use_dora" not in more
]


def with_float64(function):
    """Its result while new floats are float64."""
    torch.set_default_dtype(torch.float64)
    try:
        return function()
    finally:
        torch.set_default_dtype(torch.float32)


#: Of two matrices, a vector and whole numbers. Some differ only in the type of a number, or in which arguments share a storage.
MEMOISED = [
    lambda x, y, v, n: x @ x.t(), lambda x, y, v, n: x[2:5, 1:], lambda x, y, v, n: x.view(-1),
    lambda x, y, v, n: x.transpose(0, 1).contiguous(), lambda x, y, v, n: x.to(torch.bfloat16), lambda x, y, v, n: x.sum(0),
    lambda x, y, v, n: torch.empty_like(x), lambda x, y, v, n: x.view(torch.int32), lambda x, y, v, n: x.expand(3, 8, 8),
    lambda x, y, v, n: x.topk(2)[1], lambda x, y, v, n: x.add(1), lambda x, y, v, n: x.unsqueeze(0).mul_(2),
    lambda x, y, v, n: x.add_(1), lambda x, y, v, n: x.split(2), lambda x, y, v, n: torch._foreach_sqrt([x, v]),
    lambda x, y, v, n: torch.ops.aten.add.out(x, y, out=y), lambda x, y, v, n: torch.ops.aten.add.out(x, x, out=y),
    lambda x, y, v, n: n * 2, lambda x, y, v, n: n * 2.0, lambda x, y, v, n: with_float64(lambda: n * 2.0),
]  # fmt: skip
#: These change a view, or read data: of a constant, whose value torch knows, or of none.
OTHERS = [
    lambda x, y, v, n: x.t_(), lambda x, y, v, n: x.resize_(6, 6), lambda x, y, v, n: torch.tensor(3.0).item(),
    lambda x, y, v, n: x.nonzero(),
]  # fmt: skip


class Torch(FakeTensorMode):
    """Counts the operators that reach torch."""

    asked = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.asked += func.namespace == "aten"
        return super().__torch_dispatch__(func, types, args, kwargs)


class Remembering(TorchDispatchMode):
    """Every operator through the memoised call, as in the tracker."""

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        return fake_operators.call(func, args, kwargs or {})


@pytest.fixture
def fake(monkeypatch):
    """A FakeTensorMode with an empty memo in front of it."""
    monkeypatch.setattr(fake_operators, "_MEMO", {})
    with Torch() as mode, Remembering():
        yield mode


def inputs():
    return torch.empty(8, 8), torch.empty(8, 8), torch.empty(4), torch.empty(4, dtype=torch.int64)


def looks_of(operator, tensors):
    """A number or the container of outputs, and each with the place of its storage and of itself among inputs and outputs."""
    try:
        out = operator(*tensors)
    except DynamicOutputShapeException as error:
        return type(error)
    every = [*tensors, *(leaf for leaf in tree_leaves(out) if isinstance(leaf, torch.Tensor))]
    storages, places = ([key(tensor) for tensor in every] for key in (lambda x: x.untyped_storage()._cdata, id))
    return out if isinstance(out, float) else type(out), [
        (x.shape, x.stride(), x.storage_offset(), x.dtype, x.device, storages.index(storage), places.index(id(x)))
        for x, storage in zip(every, storages, strict=True)
    ]


def test_memoised_outputs_are_torchs_share_the_same_storages_and_are_not_inferred_again(fake):
    first = [looks_of(operator, inputs()) for operator in MEMOISED + OTHERS]
    fresh, others = ([inputs() for _ in operators] for operators in (MEMOISED, OTHERS))
    asked = fake.asked
    second = list(map(looks_of, MEMOISED, fresh))
    assert fake.asked == asked
    assert first == second + list(map(looks_of, OTHERS, others)) and fake.asked >= asked + len(OTHERS)
    with torch.utils._python_dispatch._disable_current_modes(), FakeTensorMode():
        assert first == [looks_of(operator, inputs()) for operator in MEMOISED + OTHERS]


def test_the_memo_is_bounded(fake, monkeypatch):
    monkeypatch.setattr(fake_operators, "MAX_MEMOISED", 10)
    for size in range(1, 40):
        torch.empty(size).add(1)
    assert len(fake_operators._MEMO) <= 10


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "more"),
    [
        ("llama", {}), ("gpt_oss", {"use_dora": True}),
        *(pytest.param(*case, marks=pytest.mark.exhaustive) for case in EVERY),
    ],
)  # fmt: skip
def test_a_memoised_dry_run_equals_one_without(monkeypatch, kind, more):
    recipe = settings(kind, **more)
    config = config_from(config_values(kind, num_hidden_layers=3), recipe)
    batch = Batch(rows=2, tokens=64, trained_tokens=100, padded=True, held_out=Batch(1, 64, 100, padded=True))
    remembered = [simulate(config, recipe, batch, (8, 6)) for _ in range(2)][1]
    monkeypatch.setattr(fake_operators, "call", lambda func, args, kwargs: func(*args, **kwargs))
    assert simulate(config, recipe, batch, (8, 6)) == remembered
