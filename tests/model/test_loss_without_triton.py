"""A card without a compiler computes TRL's loss with torch's operators: the same numbers, in the memory of the kernels."""

import pytest
import torch
from trl.kernels import chunked_logprob
from trl.trainer import utils

from finetune.compat import owner_of
from finetune.compat.trl import compute_loss_without_triton

NAMES = ["trl.trainer.utils._use_triton", *(f"trl.kernels.chunked_logprob.{name}" for name in (
    "_use_triton", "_forward_tile", "_backward_tile",
))]  # fmt: skip
TOKENS, WIDTH, WORDS = 300, 16, 1000  # neither is a multiple of a slice or a chunk


@pytest.fixture
def restored_trl(monkeypatch):
    for name in NAMES:
        owner, attribute = owner_of(name)
        monkeypatch.setattr(owner, attribute, getattr(owner, attribute))


def loss(softcap):
    generator = torch.Generator().manual_seed(0)
    hidden = torch.randn(TOKENS, WIDTH, generator=generator, requires_grad=True)
    weight = torch.randn(WORDS, WIDTH, generator=generator, requires_grad=True)
    targets = torch.randint(WORDS, (TOKENS,), generator=generator)
    outputs = chunked_logprob.ChunkedLogProbFunction.apply(hidden, weight, None, targets, 1.0, 256, softcap)
    (outputs[0].sum() + outputs[1].sum()).backward()
    return [*(value.detach() for value in outputs), hidden.grad, weight.grad]


@pytest.mark.parametrize("softcap", [None, 5.0])
def test_loss_and_gradients_are_the_same_to_the_bit(restored_trl, softcap):
    whole = loss(softcap)
    compute_loss_without_triton()
    assert all(torch.equal(tensor, sliced) for tensor, sliced in zip(whole, loss(softcap), strict=True))


def test_on_a_card_only_trained_positions_are_computed_and_no_operator_makes_a_tensor_of_the_tiles_size(restored_trl):
    compute_loss_without_triton()
    with Largest() as largest:
        loss(None)
    assert largest.elements <= max(TOKENS * 256, WORDS * WIDTH)  # the tile itself, which Triton has, too
    assert largest.elements_in_tiles <= 64 * 256
    card = torch.device("cuda")
    assert utils._use_triton(card) and not chunked_logprob._use_triton(card)


class Largest(torch.utils._python_dispatch.TorchDispatchMode):
    """The largest tensor that an operator makes; `made_in_tiles`: of those between the product and the next one."""

    def __init__(self):
        super().__init__()
        self.elements = self.elements_in_tiles = 0

    def __torch_dispatch__(self, function, types, arguments=(), named=None):
        output = function(*arguments, **(named or {}))
        if isinstance(output, torch.Tensor):
            self.elements = max(self.elements, output.numel())
            if function in (torch.ops.aten.exp.default, torch.ops.aten.sub.Tensor, torch.ops.aten.zeros_like.default):
                self.elements_in_tiles = max(self.elements_in_tiles, output.numel())
        return output
