"""Trains the bundled base model `tiny`, a Llama of 2.2 million parameters, from random weights on a CPU in about six minutes.

    python scripts/bundled/make_base.py [FOLDER]

It learns to answer questions about support messages (`pretraining`), and is saved only if it answers on held-out messages.
The same seeds, versions and number of threads give the same file.
"""

from __future__ import annotations

import random
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

import muon
from make_data import BUNDLED, bundled_texts
from pretraining import Conversation, conversations, corpus_texts, questions

SEED = 20261
VOCABULARY_SIZE, LONGEST_ROW = 640, 512
STEPS, BATCH_SIZE, PEAK_RATE, WARMUP_STEPS = 900, 24, 4e-3, 40
QUESTION_WEIGHT = 0.2  # of a token the model doesn't have to say, against 1 for an answer's
GATE_ROWS, GATE_SHARE = 260, 0.95
PAD, END, SYSTEM, USER, ASSISTANT = "<|pad|>", "<|end|>", "<|system|>", "<|user|>", "<|assistant|>"
CHAT_TEMPLATE = (BUNDLED / "tiny-base" / "chat_template.jinja").read_text(encoding="utf-8")


def make_tokenizer() -> PreTrainedTokenizerFast:
    """A byte-level BPE of VOCABULARY_SIZE tokens, each digit a token, with the chat template."""
    tokenizer = Tokenizer(models.BPE())
    digits, byte_level = pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([digits, byte_level])
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY_SIZE,
        special_tokens=[PAD, END, SYSTEM, USER, ASSISTANT],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(corpus_texts(random.Random(SEED), 6000), trainer)
    wrapped = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        pad_token=PAD,
        eos_token=END,
        additional_special_tokens=[SYSTEM, USER, ASSISTANT],
        model_max_length=LONGEST_ROW,
        clean_up_tokenization_spaces=False,
    )
    wrapped.chat_template = CHAT_TEMPLATE
    return wrapped


def make_model() -> LlamaForCausalLM:
    """The untrained model in float32, of the bundled one's configuration."""
    torch.manual_seed(SEED)
    return LlamaForCausalLM(LlamaConfig.from_pretrained(BUNDLED / "tiny-base", dtype=torch.float32))


def pretrain(model: LlamaForCausalLM, tokenizer: PreTrainedTokenizerFast, excluded: set[str]) -> None:
    """STEPS steps on new conversations."""
    rng = random.Random(SEED + 1)

    def losses() -> tuple[torch.Tensor, float]:
        return _losses(model, collate(tokenizer, conversations(rng, BATCH_SIZE, excluded)))

    muon.pretrain(model, losses, steps=STEPS, peak_rate=PEAK_RATE, warmup_steps=WARMUP_STEPS, every=50)


def collate(tokenizer: PreTrainedTokenizerFast, batch: list[Conversation]) -> dict[str, torch.Tensor]:
    """Conversations as right-padded `ids` and `answer` (1 where the model speaks), each of shape (rows, longest row)."""
    options: dict[str, Any] = {"tokenize": True, "return_dict": True, "return_assistant_tokens_mask": True}
    rows: list[Any] = [tokenizer.apply_chat_template(conversation, **options) for conversation in batch]
    longest = max(len(row["input_ids"]) for row in rows)
    ids = torch.full((len(rows), longest), tokenizer.pad_token_id)
    answer = torch.zeros((len(rows), longest))
    for index, row in enumerate(rows):
        ids[index, : len(row["input_ids"])] = torch.tensor(row["input_ids"])
        answer[index, : len(row["input_ids"])] = torch.tensor(row["assistant_masks"], dtype=torch.float32)
    return {"ids": ids, "answer": answer, "real": (ids != tokenizer.pad_token_id).float()}


def _losses(model: LlamaForCausalLM, batch: dict[str, torch.Tensor]) -> tuple[torch.Tensor, float]:
    """Weighted loss to train on, and the mean loss of the answers' tokens alone."""
    logits = model(input_ids=batch["ids"]).logits[:, :-1]  # padding is on the right, where causal attention never looks
    token_losses = torch.nn.functional.cross_entropy(logits.flatten(0, 1), batch["ids"][:, 1:].flatten(), reduction="none")
    answer_mask, token_mask = batch["answer"][:, 1:].flatten(), batch["real"][:, 1:].flatten()
    weight = answer_mask + QUESTION_WEIGHT * (token_mask - answer_mask)
    return (token_losses * weight).sum() / weight.sum(), float((token_losses.detach() * answer_mask).sum() / answer_mask.sum())


@torch.no_grad()
def score(model: Any, tokenizer: PreTrainedTokenizerFast, conversations: list[Conversation]) -> dict[str, float]:
    """Share of greedy answers that equal the expected text, for each question and in total (`all`)."""
    model.eval()
    correct, total = Counter[str](), Counter[str]()
    for question, answer in conversations:
        ids: Any = tokenizer.apply_chat_template([question], add_generation_prompt=True, return_tensors="pt", return_dict=True)
        answer_ids = model.generate(**ids, max_new_tokens=80, do_sample=False)[0, ids["input_ids"].shape[1] :]
        matches = (
            tokenizer.decode(answer_ids, skip_special_tokens=True) == answer["content"]
            and answer_ids[-1] == tokenizer.eos_token_id
        )
        name = question["content"].split("?")[0].split(".")[0]
        for key in (name, "all"):
            correct[key] += int(matches)
            total[key] += 1
    return {key: correct[key] / total[key] for key in total}


def main(folder: Path) -> int:
    """Build, train, score and save. Returns 1 without saving if the score is below GATE_SHARE."""
    torch.manual_seed(SEED)
    excluded = bundled_texts()
    tokenizer = make_tokenizer()
    model = make_model()
    print(f"{model.num_parameters():,} parameters, {len(tokenizer)} tokens, {torch.get_num_threads()} threads")
    held_out = questions(random.Random(SEED + 2), GATE_ROWS, excluded)
    pretrain(model, tokenizer, excluded)
    muon.round_to_bfloat16(model)
    accuracies = score(model, tokenizer, held_out)
    for name, accuracy in accuracies.items():
        print(f"{accuracy:7.1%}  {name}")
    if accuracies["all"] < GATE_SHARE:
        print(f"below {GATE_SHARE:.0%}: nothing saved")
        return 1
    save(model, tokenizer, folder)
    return 0


def save(model: Any, tokenizer: PreTrainedTokenizerFast, folder: Path) -> None:
    """Weights in bfloat16 as safetensors, greedy decoding as the default."""
    model.generation_config.max_length = None
    model.generation_config.max_new_tokens = 96
    model.to(torch.bfloat16).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    print(f"{folder}: {sum(path.stat().st_size for path in folder.iterdir()):,} bytes")


if __name__ == "__main__":
    raise SystemExit(main(Path(sys.argv[1]) if len(sys.argv) > 1 else BUNDLED / "tiny-base"))
