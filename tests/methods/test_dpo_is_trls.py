"""Loss, rewards and gradients of pairs against TRL's own DPOTrainer, on the same rows."""

import functools
import itertools

import pytest
import torch
from datasets import Dataset
from peft import LoraConfig
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import WhitespaceSplit
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast
from trl import DPOConfig, DPOTrainer
from trl.trainer.dpo_trainer import DataCollatorForPreference
from trl.trainer.sft_trainer import DataCollatorForLanguageModeling

from finetune.layers.checkpointing import decoder_layers
from finetune.layers.compiled import compile_layers, undo_compiling, use_operators
from finetune.layers.lean_layers import make_lean, undo_lean
from finetune.methods import method_of
from finetune.methods.preferences import PREFERENCE_LOSSES
from finetune.recipe import recipe_from
from finetune.settings import resolve_plain
from finetune.settings.methods import METHODS

VOCABULARY = 64
#: Prompt, chosen and rejected answer as vocabulary, of uneven lengths.
PAIRS = [("w3 w4 w5", "w6 w7", "w8 w9 w10 w11"), ("w12", "w13 w14 w15 w16 w17", "w18")]
#: What is done to a model's layers before its loss is computed.
LAYERS = {"plain": (), "lean": (make_lean,), "compiled": (use_operators, compile_layers)}


def tokenizer():
    vocabulary = {f"w{number}": number for number in range(VOCABULARY - 2)} | {"<pad>": VOCABULARY - 2, "<eos>": VOCABULARY - 1}
    backend = Tokenizer(WordLevel(vocabulary, "w0"))
    backend.pre_tokenizer = WhitespaceSplit()
    return PreTrainedTokenizerFast(tokenizer_object=backend, pad_token="<pad>", eos_token="<eos>")


def trained_by_trl(trainer_class, config_class, folder, texts, **arguments):
    """TRL's trainer, of a model whose adapter is not zero, so that it differs from its reference."""
    torch.manual_seed(0)
    config = LlamaConfig(
        hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4, vocab_size=VOCABULARY, pad_token_id=62
    )
    usual = {"use_cpu": True, "bf16": False, "report_to": [], "beta": 0.3, "max_length": None}
    trainer = trainer_class(
        model=LlamaForCausalLM(config), args=config_class(output_dir=str(folder), **usual, **arguments),
        train_dataset=Dataset.from_list(texts), processing_class=tokenizer(),
        peft_config=LoraConfig(r=4, target_modules="all-linear", task_type="CAUSAL_LM"),
    )  # fmt: skip
    for name, parameter in trainer.model.named_parameters():
        if "lora_B" in name:
            torch.nn.init.normal_(parameter, std=0.1)
    return trainer


@pytest.fixture(scope="module")
def trainer(tmp_path_factory):
    texts = [{"prompt": p, "chosen": f" {c}", "rejected": f" {r}"} for p, c, r in PAIRS]
    return trained_by_trl(DPOTrainer, DPOConfig, tmp_path_factory.mktemp("trl"), texts)


def rows():
    """The pairs as this project's rows, and as TRL's."""
    ids = [[[int(word[1:]) for word in text.split()] for text in texts] for texts in PAIRS]
    ours, trls = [], []
    for prompt, chosen, rejected in ids:
        row = {}
        for prefix, answer in (("", chosen), ("rejected_", rejected)):
            row |= {f"{prefix}input_ids": prompt + answer, f"{prefix}labels": [-100] * len(prompt) + answer}
        ours.append(row)
        trls.append({"prompt_ids": prompt, "chosen_ids": chosen, "rejected_ids": rejected})
    return ours, trls


def method_with(**settings):
    return method_of(resolve_plain(recipe_from({"model_name_or_path": "m", "dataset": "d.jsonl", "beta": 0.3, **settings})))


def gradients(model):
    copies = {name: parameter.grad.clone() for name, parameter in model.named_parameters() if parameter.grad is not None}
    model.zero_grad()
    return copies


def compute(method, model, ours, layers):
    """This project's loss of these rows, after its backward pass, and its metrics."""
    for change in LAYERS[layers]:
        change(decoder_layers(model))
    computed = method.loss(model, method.collator(DataCollatorForLanguageModeling(pad_token_id=62))(ours))
    computed.loss.backward()
    for undo in (undo_lean, undo_compiling):
        undo(decoder_layers(model))
    return computed.loss, method.metrics({name: float(count) for name, count in computed.counts.items()})


def assert_same_gradients(model, expected):
    computed = gradients(model)
    assert computed.keys() == expected.keys()
    for name, gradient in computed.items():
        # sums of fp32 in another order; 1e-6 was reached on one kind of CPU, and 1.02e-6 was measured on another
        assert (gradient - expected[name]).norm() < 4e-6 * expected[name].norm(), name


def test_every_loss_of_the_recipe_has_its_function():
    assert tuple(PREFERENCE_LOSSES) == METHODS["dpo"].losses


COMPILED = [
    pytest.param(loss_type, "compiled", marks=[pytest.mark.compiler, pytest.mark.exhaustive if number else pytest.mark.slow])
    for number, loss_type in enumerate(PREFERENCE_LOSSES)
]


@pytest.mark.parametrize(("loss_type", "layers"), [*itertools.product(PREFERENCE_LOSSES, ("plain", "lean")), *COMPILED])
def test_loss_rewards_and_gradients_are_trls(trainer, loss_type, layers, monkeypatch):
    # test_compile.py has the code that Inductor makes
    monkeypatch.setattr(torch, "compile", functools.partial(torch.compile, backend="aot_eager"))
    ours, trls = rows()
    model = trainer.model.train()
    trainer.loss_types, trainer.label_smoothing = [loss_type], 0.2
    theirs = trainer.compute_loss(model, DataCollatorForPreference(pad_token_id=62)(trls))
    theirs.backward()
    expected = gradients(model)

    smoothing = {"label_smoothing": 0.2} if loss_type == "robust" else {}
    loss, metrics = compute(method_with(method="dpo", loss_type=loss_type, **smoothing), model, ours, layers)
    assert loss.item() == pytest.approx(theirs.item(), rel=1e-6, abs=1e-7)
    assert_same_gradients(model, expected)
    measured = {name: values[-1] for name, values in trainer._metrics["train"].items() if name in metrics}
    assert metrics == pytest.approx(measured, abs=1e-6)
    assert len(measured) == 4


def test_sfts_loss_on_the_chosen_answer_is_trls(trainer):
    """Of one pair at a time: TRL's is a mean over the tokens of all pairs of a micro-batch, this one of each pair, so that it
    does not depend on the micro-batch."""
    ours, trls = rows()
    method, losses = method_with(method="dpo", sft_weight=0.5), []
    collated = method.collator(DataCollatorForLanguageModeling(pad_token_id=62))
    trainer.loss_types, trainer.loss_weights = ["sigmoid", "sft"], [1.0, 0.5]
    for row, trls_row in zip(ours, trls, strict=True):
        theirs = trainer.compute_loss(trainer.model, DataCollatorForPreference(pad_token_id=62)([trls_row]))
        losses.append(method.loss(trainer.model, collated([row])).loss.item())
        assert losses[-1] == pytest.approx(theirs.item(), rel=1e-6)
    trainer.loss_weights = [1.0]
    assert method.loss(trainer.model, collated(ours)).loss.item() == pytest.approx(sum(losses) / len(losses), rel=1e-6)


def test_the_reference_is_the_adapter_that_training_went_on_from_as_trls_second_adapter(trainer):
    """Last: it changes the trainer's model."""
    ours, trls = rows()
    model = trainer.model.train()
    method = method_with(method="dpo", adapter_name_or_path="sft")
    method.copy_reference(model)
    model.add_adapter("ref", model.peft_config["default"])
    weights = dict(model.named_parameters())
    for name, parameter in weights.items():
        if ".default." in name:
            weights[name.replace(".default.", ".ref.")].data.copy_(parameter.data)
            parameter.data += 0.05 * torch.randn_like(parameter)
    trained = [parameter.clone() for parameter in model.parameters() if parameter.requires_grad]
    trainer.loss_types, trainer.label_smoothing = ["sigmoid"], 0.0
    theirs = trainer.compute_loss(model, DataCollatorForPreference(pad_token_id=62)(trls))
    computed = method.loss(model, method.collator(DataCollatorForLanguageModeling(pad_token_id=62))(ours))
    assert computed.loss.item() == pytest.approx(theirs.item(), rel=1e-6)
    theirs.backward()
    expected = gradients(model)
    computed.loss.backward()
    assert_same_gradients(model, expected)
    assert all(map(torch.equal, trained, (parameter for parameter in model.parameters() if parameter.requires_grad)))
