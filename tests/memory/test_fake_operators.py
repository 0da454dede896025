"""Memoised fake-tensor outputs equal torch's, and share the same storages."""

import pytest
import torch
from tiny_models import TYPES, config_values, settings
from torch._subclasses.fake_tensor import DynamicOutputShapeException, FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode

from finetune.memory import fake_operators
from finetune.memory.forecast import Batch
from finetune.memory.simulate import simulate
from finetune.model.transformers_config import config_from

TECHNIQUES = [{}, {"use_dora": True}, {"load_in_4bit": False, "load_in_8bit": True}, {"optim": "adafactor"}]
#: PEFT has no DoRA for experts.
EVERY = [
    (kind, more) for kind in TYPES for more in TECHNIQUES if kind not in ("mixtral", "qwen3_moe") or "use_dora" not in more
]


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


def looks(tensor):
    return tensor.shape, tensor.stride(), tensor.storage_offset(), tensor.dtype, tensor.device


def shared(tensor, other):
    return tensor.untyped_storage()._cdata == other.untyped_storage()._cdata


@pytest.mark.parametrize(
    "operator",
    [
        lambda x: x @ x.t(), lambda x: x[2:5, 1:], lambda x: x.view(-1), lambda x: x.transpose(0, 1).contiguous(),
        lambda x: x.to(torch.bfloat16), lambda x: x.sum(0), lambda x: torch.empty_like(x), lambda x: x.view(torch.int32),
        lambda x: x.expand(3, 8, 8), lambda x: x.topk(2)[1], lambda x: x.add(1), lambda x: x.unsqueeze(0).mul_(2),
    ],
)  # fmt: skip
def test_a_memoised_output_equals_the_first_one_and_shares_the_same_storages(fake, operator):
    inputs = [torch.empty(8, 8), torch.empty(8, 8)]
    first = operator(inputs[0])
    asked = fake.asked
    second = operator(inputs[1])
    assert fake.asked == asked
    assert looks(second) == looks(first)
    assert shared(second, inputs[1]) == shared(first, inputs[0])


def test_in_place_operators_return_their_argument(fake):
    tensors = [torch.empty(4) for _ in range(3)]
    assert all(tensor.add_(1) is tensor for tensor in tensors)


def test_several_outputs_keep_their_container(fake):
    for _ in range(2):
        values = torch.empty(6, 4)
        parts = values.split(2)
        assert [part.storage_offset() for part in parts] == [0, 8, 16] and all(shared(part, values) for part in parts)
        roots = torch._foreach_sqrt([values, values[0]])
        assert [root.shape for root in roots] == [(6, 4), (4,)] and not shared(*roots)


def test_which_arguments_share_a_storage_is_part_of_the_signature(fake):
    add, out = torch.ops.aten.add.out, [torch.empty(4) for _ in range(3)]
    assert add(out[0], out[1], out=out[1]) is out[1]
    assert add(out[0], out[1], out=out[2]) is out[2]


def test_equal_numbers_of_different_types_are_different_signatures(fake):
    values = torch.empty(4, dtype=torch.int64)
    assert [(values * factor).dtype for factor in (2, 2.0, 2, 2.0)] == [torch.int64, torch.float32] * 2


def test_the_default_dtype_is_part_of_the_signature(fake):
    values = torch.empty(4, dtype=torch.int64)
    assert (values * 2.0).dtype is torch.float32
    torch.set_default_dtype(torch.float64)
    try:
        assert (values * 2.0).dtype is torch.float64
    finally:
        torch.set_default_dtype(torch.float32)


def test_operators_that_change_a_view_or_read_data_are_not_memoised(fake):
    for _ in range(2):
        values = torch.empty(2, 3)
        assert values.t_().shape == (3, 2)
        assert values.resize_(6, 6).shape == (6, 6)
        assert torch.tensor(3.0).item() == 3.0  # a constant, whose value torch knows
        with pytest.raises(DynamicOutputShapeException):
            torch.empty(4).nonzero()


def test_the_memo_is_bounded(fake, monkeypatch):
    monkeypatch.setattr(fake_operators, "MOST_MEMOISED", 10)
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
