"""Loss, rewards, KL and gradients of labelled answers against TRL's own KTOTrainer, on the same rows."""

import pytest
from trl import KTOConfig, KTOTrainer
from trl.trainer.kto_trainer import DataCollatorForUnpairedPreference
from trl.trainer.sft_trainer import DataCollatorForLanguageModeling
from trl.trainer.utils import add_fused_lm_head

from tests.methods.test_dpo_is_trls import assert_same_gradients, compute, gradients, method_with, trained_by_trl

#: Prompt and answer as vocabulary, of uneven lengths, and whether it is good.
ROWS = [("w3 w4 w5", "w6 w7", True), ("w12", "w13 w14 w15 w16 w17", False), ("w9 w8", "w7", True), ("w30", "w32 w33", False)]


@pytest.fixture(scope="module")
def trainer(tmp_path_factory):
    texts = [{"prompt": prompt, "completion": f" {answer}", "label": good} for prompt, answer, good in ROWS]
    trainer = trained_by_trl(
        KTOTrainer, KTOConfig, tmp_path_factory.mktemp("trl"), texts, per_device_train_batch_size=4, desirable_weight=1.5,
        undesirable_weight=0.7, train_sampling_strategy="sequential",
    )  # fmt: skip
    add_fused_lm_head(trainer.model.get_base_model(), outputs=("log_probs", "entropy", "mean_logits", "is_top1"))
    return trainer


def rows(only=None):
    """The labelled answers as this project's rows, and as TRL's."""
    selected = [row for row in ROWS if only is None or row[2] == only]
    ids = [[[int(word[1:]) for word in text.split()] for text in texts[:2]] for texts in selected]
    ours = [
        {"input_ids": prompt + answer, "labels": [-100] * len(prompt) + answer, "desirable": row[2]}
        for (prompt, answer), row in zip(ids, selected, strict=True)
    ]
    mismatched = [ids[index - 1][1] for index in range(len(ids))]
    trls = [
        {"prompt_ids": prompt, "completion_ids": answer, "KL_completion_ids": other, "label": row[2]}
        for (prompt, answer), other, row in zip(ids, mismatched, selected, strict=True)
    ]
    return ours, trls


@pytest.mark.parametrize(
    "layers", ["plain", "lean", pytest.param("compiled", marks=[pytest.mark.exhaustive, pytest.mark.compiler])]
)
@pytest.mark.parametrize("only", [None, True, False], ids=["both", "good", "bad"])
@pytest.mark.parametrize("loss_type", ["kto", "apo_zero_unpaired"])
def test_loss_rewards_kl_and_gradients_are_trls(trainer, loss_type, only, layers):
    ours, trls = rows(only)
    model = trainer.model.train()
    trainer.loss_type, trainer.calculate_KL = loss_type, loss_type == "kto"
    trainer._metrics["train"].clear()
    theirs = trainer.compute_loss(model, DataCollatorForUnpairedPreference(pad_token_id=62)(trls))
    theirs.backward()
    expected = gradients(model)

    method = method_with(method="kto", loss_type=loss_type, desirable_weight=1.5, undesirable_weight=0.7)
    loss, metrics = compute(method, model, ours, layers)
    assert loss.item() == pytest.approx(theirs.item(), rel=1e-6, abs=1e-7)
    assert_same_gradients(model, expected)
    for name in ("kl", "rewards/chosen", "rewards/rejected", "rewards/margins"):
        if name in metrics:
            assert metrics[name] == pytest.approx(trainer._metrics["train"][name][-1], abs=1e-6)


def test_a_mismatched_answer_brings_its_labels_and_is_truncated_and_one_row_is_compared_with_nothing(trainer):
    method = method_with(method="kto")
    batch = method.collator(DataCollatorForLanguageModeling(pad_token_id=62))(rows()[0][:1])
    assert method.loss(trainer.model, batch).counts["kl"] == 0
    answers = [
        {"input_ids": [1, 2, 3, 4, 5], "labels": [-100, -100, 3, -100, 5], "desirable": True},
        {"input_ids": [6, 7], "labels": [-100, 7], "desirable": False},
    ]
    method = method_with(method="kto", max_length=8)
    method.settings = method.settings.model_copy(update={"max_length": 3})
    batch = method.collator(DataCollatorForLanguageModeling(pad_token_id=62))(answers)
    assert batch["kl_input_ids"].tolist() == [[1, 2, 7], [6, 3, 4]]
    assert batch["kl_labels"].tolist() == [[-100, -100, 7], [-100, 3, -100]]
    assert batch["desirable"].tolist() == [True, False]
