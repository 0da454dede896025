"""TRL's trainer is given the prepared rows, packed or not, and trains on exactly them: nothing is cut or tokenised again."""

import pytest
import torch
from datasets import Dataset
from hypothesis import given, settings
from hypothesis import strategies as st
from small_data import CHATML, build_tokenizer, prepare, recipe, talk
from transformers import LlamaConfig, LlamaForCausalLM
from trl import SFTConfig, SFTTrainer, pack_dataset

from finetune.data.splits import pack
from finetune.errors import DataError

pytestmark = pytest.mark.slow  # imports TRL and runs a model

#: What SFTTrainer needs to be told.
GIVEN = {"max_length": None, "packing": False, "dataset_kwargs": {"skip_prepare_dataset": True}}


def trainer_for(dataset, tokenizer, tmp_path, batch=2, **options):
    torch.manual_seed(0)
    model = LlamaForCausalLM(
        LlamaConfig(
            vocab_size=len(tokenizer), hidden_size=16, intermediate_size=32, num_hidden_layers=1, num_attention_heads=2,
            pad_token_id=tokenizer.pad_token_id, max_position_embeddings=2048, initializer_range=0.8,
        )
    )  # fmt: skip
    args = SFTConfig(
        str(tmp_path), save_strategy="no", disable_tqdm=True, bf16=False, per_device_train_batch_size=batch, max_steps=1,
        learning_rate=1e-9, logging_steps=1, report_to=[], use_cpu=True, **GIVEN, **options,
    )  # fmt: skip
    return SFTTrainer(model=model, args=args, train_dataset=dataset, processing_class=tokenizer)


@pytest.fixture
def prepared(write):
    rows = [talk(f"question {n}", "answer " * (1 + n % 5)) for n in range(9)] + [talk("long", "word " * 1500)]
    return prepare(recipe(write("rows.jsonl", rows)), build_tokenizer(CHATML, pad_token="</s>"), max_length=None)


def pairs(batch):
    """(ids, labels) of each row of a padded batch."""
    for ids, labels, mask in zip(batch["input_ids"], batch["labels"], batch["attention_mask"], strict=True):
        length = int(mask.sum())
        assert (labels[length:] == -100).all()
        yield tuple(ids[:length].tolist()), tuple(labels[:length].tolist())


def test_batches_hold_every_row_once_whole_with_its_labels(prepared, tmp_path):
    trainer = trainer_for(prepared.train, build_tokenizer(CHATML), tmp_path)
    seen = sorted(pair for batch in trainer.get_train_dataloader() for pair in pairs(batch))
    assert seen == sorted((tuple(row["input_ids"]), tuple(row["labels"])) for row in prepared.train)
    assert max(len(ids) for ids, _ in seen) > 1024  # TRL's own default would have cut this one


def test_the_logged_loss_is_the_mean_over_the_trained_tokens(prepared, tmp_path):
    trainer = trainer_for(prepared.train.select([0, 3]), build_tokenizer(CHATML), tmp_path)
    losses = []
    with torch.no_grad():
        for row in prepared.train.select([0, 3]):
            logits = trainer.model(torch.tensor([row["input_ids"]])).logits[0, :-1]
            losses.append(
                torch.nn.functional.cross_entropy(logits, torch.tensor(row["labels"][1:]), ignore_index=-100, reduction="none")
            )
    trained = torch.cat(losses)
    expected = trained.sum() / (trained != 0).sum()
    by_row = torch.stack([loss.sum() / (loss != 0).sum() for loss in losses]).mean()
    assert abs(expected - by_row) > 1e-3  # rows weigh by tokens
    assert trainer.train().training_loss == pytest.approx(expected.item(), rel=1e-4)


def test_packed_rows_give_the_loss_of_the_same_rows_alone(prepared, tmp_path):
    rows = prepared.train.select(range(6))
    packed = pack(rows, 256, seed=0)
    alone = trainer_for(rows, build_tokenizer(CHATML), tmp_path, batch=6).train().training_loss
    together = trainer_for(packed, build_tokenizer(CHATML), tmp_path, batch=len(packed), padding_free=True)
    [batch] = together.get_train_dataloader()
    assert "attention_mask" not in batch and batch["input_ids"].numel() == sum(prepared.lengths[:6])
    assert (batch["position_ids"] == 0).sum() == 6
    assert together.train().training_loss == pytest.approx(alone, rel=1e-4)
    mixed = trainer_for(packed.remove_columns("seq_lengths"), build_tokenizer(CHATML), tmp_path, batch=len(packed))
    assert mixed.train().training_loss != pytest.approx(alone, rel=1e-2)  # rows that see each other give another loss


def dataset_of(lengths):
    """Rows of distinct ids; every third token is not trained."""
    rows, start = [], 0
    for length in lengths:
        rows.append(list(range(start, start + length)))
        start += length
    return Dataset.from_dict(
        {"input_ids": rows, "labels": [[-100 if token % 3 == 0 else token for token in row] for row in rows]}
    )


def unpacked(packed):
    rows = []
    for row in packed:
        start = 0
        for length in row["seq_lengths"]:
            rows.append((tuple(row["input_ids"][start : start + length]), tuple(row["labels"][start : start + length])))
            start += length
        assert start == len(row["input_ids"]) == len(row["labels"])
    return sorted(rows)


@settings(max_examples=12, deadline=None)
@given(lengths=st.lists(st.integers(1, 32), min_size=1, max_size=40), seed=st.integers(0, 3))
def test_every_row_comes_out_of_packing_whole_with_its_labels(lengths, seed):
    dataset = dataset_of(lengths)
    packed = pack(dataset, 32, seed)
    assert unpacked(packed) == sorted((tuple(row["input_ids"]), tuple(row["labels"])) for row in dataset)
    assert max(len(row) for row in packed["input_ids"]) <= 32
    assert packed.column_names == ["input_ids", "labels", "seq_lengths"]


def test_packing_fills_sequences_the_same_for_the_same_seed_and_refuses_a_row_that_trl_would_cut():
    dataset = dataset_of([1 + (n * 37) % 90 for n in range(2500)])
    packed = pack(dataset, 128, 1)
    assert len(packed) < 1.05 * sum(len(row) for row in dataset["input_ids"]) / 128 + 3
    assert packed["input_ids"][:] == pack(dataset, 128, 1)["input_ids"][:] != pack(dataset, 128, 2)["input_ids"][:]
    dataset = dataset_of([5, 40])
    assert sum(map(len, pack_dataset(dataset, 32)["input_ids"])) == 37
    with pytest.raises(DataError, match="40 tokens.*max_length 32"):
        pack(dataset, 32, 0)
