"""Trains the bundled base model `tiny`, a Llama of 2.2 million parameters, from random weights on a CPU in about six minutes.

    python scripts/bundled/make_base.py [FOLDER]

It learns to answer questions about support messages, never the routing task, and is saved only if it answers on held-out
messages. The same seeds, versions and number of threads give the same file.
"""

from __future__ import annotations

import json
import random
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from transformers import AutoTokenizer, LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

import muon
from make_data import ARTICLES, BUNDLED, NO_ARTICLE, PARTS, Message, bundled_texts, draw_messages

Conversation = list[dict[str, str]]

SEED = 20261
VOCABULARY_SIZE = 640
STEPS, BATCH_SIZE, PEAK_RATE, WARMUP_STEPS = 900, 24, 4e-3, 40
QUESTION_WEIGHT = 0.2  # of a token the model doesn't have to say, against 1 for an answer's
GATE_ROWS, GATE_SHARE = 260, 0.95


ROOMS, WISHES, URGENCY_ANSWERS, SMALL_TALK = (PARTS[name] for name in ("rooms", "wishes", "urgency_answers", "small_talk"))


def _article(message: Message) -> str:
    return "no article" if message.article == NO_ARTICLE else f"the {message.article}"


def _sentence(message: Message) -> str:
    article_sentence = "" if message.article == NO_ARTICLE else f" It concerns {_article(message)}."
    return f"The customer wants {WISHES[message.topic]}.{article_sentence} {URGENCY_ANSWERS[message.urgency]}"


def _facts(message: Message) -> str:
    return f"- topic: {message.topic}\n- article: {message.article}\n- time: {message.urgency}"


def _tags(message: Message) -> str:
    return ", ".join((message.topic, message.article, message.urgency))


def _record(**fields: Callable[[Message], object]) -> Callable[[Message], str]:
    return lambda message: json.dumps({key: value(message) for key, value in fields.items()})


#: Question -> how it is answered. None of the records has the keys or the values of the routing task.
TASKS: dict[str, Callable[[Message], str]] = {
    "What is this about?": lambda message: f"It is about {message.topic}.",
    "How urgent is this?": lambda message: URGENCY_ANSWERS[message.urgency],
    "Which article is it?": lambda message: f"It is {_article(message)}.",
    "Where do the goods belong?": lambda message: f"They belong in the {ROOMS[message.article]}.",
    "What does the customer want?": lambda message: f"The customer wants {WISHES[message.topic]}.",
    "Summarize this message.": _sentence,
    "List the facts.": _facts,
    "Give me tags.": _tags,
    "Write a note as JSON.": _record(topic=lambda m: m.topic, article=lambda m: m.article, time=lambda m: m.urgency),
    "Write a ticket as JSON.": _record(
        article=lambda m: m.article, hurry=lambda m: m.urgency == "urgent", subject=lambda m: WISHES[m.topic]
    ),
    "Write a stock record as JSON.": _record(
        room=lambda m: ROOMS[m.article], goods=lambda m: [m.article], about=lambda m: m.topic
    ),
    "Write a short record as JSON.": _record(subject=lambda m: m.topic, goods=lambda m: m.article),
    "Write the timing as JSON.": _record(time=lambda m: m.urgency, bought=lambda m: PARTS["stages"].get(m.topic, "after")),
}


def conversations(rng: random.Random, count: int, excluded: set[str], turns: int = 3) -> list[Conversation]:
    """`count` conversations about messages not in `excluded` (which grows), each with up to `turns` questions."""
    return [_conversation(rng, message, rng.randint(1, turns)) for message in draw_messages(rng, count, excluded)]


def questions(rng: random.Random, count: int, excluded: set[str]) -> list[Conversation]:
    """`count` conversations of one question and its answer, each task in turn, to score the base model on."""
    tasks = list(TASKS)
    return [
        [_ask(tasks[index % len(tasks)], message.text), _say(TASKS[tasks[index % len(tasks)]](message))]
        for index, message in enumerate(draw_messages(rng, count, excluded))
    ]


def corpus_texts(rng: random.Random, count: int) -> list[str]:
    """Plain text to train the tokenizer on: the messages of `count` conversations, and the articles' names."""
    texts = [turn["content"] for conversation in conversations(rng, count, set()) for turn in conversation]
    return [*texts, *(noun for nouns in ARTICLES.values() for noun in nouns)]


def _conversation(rng: random.Random, message: Message, turns: int) -> Conversation:
    messages: Conversation = []
    if rng.random() < 0.15:
        messages.append({"role": "system", "content": rng.choice(PARTS["system_prompts"])})
    if rng.random() < 0.03:
        greeting = rng.choice(list(SMALL_TALK))
        return [*messages, {"role": "user", "content": greeting}, _say(SMALL_TALK[greeting])]
    for index, task in enumerate(rng.sample(list(TASKS), turns)):
        question = _ask(task, message.text) if index == 0 else {"role": "user", "content": task}
        messages += [question, _say(TASKS[task](message))]
    return messages


def _ask(task: str, text: str) -> dict[str, str]:
    return {"role": "user", "content": f"{task} {text}"}


def _say(text: str) -> dict[str, str]:
    return {"role": "assistant", "content": text}


def make_tokenizer() -> Any:
    """A byte-level BPE of VOCABULARY_SIZE tokens, each digit a token, as the bundled one, trained on this text."""
    bundled = AutoTokenizer.from_pretrained(BUNDLED / "tiny-base")
    tokenizer = bundled.train_new_from_iterator(corpus_texts(random.Random(SEED), 6000), VOCABULARY_SIZE, show_progress=False)
    for name in ("is_local", "local_files_only"):  # of the bundled one's folder
        tokenizer.init_kwargs.pop(name, None)
    return tokenizer


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
def score(model: Any, tokenizer: PreTrainedTokenizerFast, conversations: list[Conversation]) -> float:
    """Share of greedy answers that equal the expected text."""
    model.eval()
    correct = 0
    for question, answer in conversations:
        ids: Any = tokenizer.apply_chat_template([question], add_generation_prompt=True, return_tensors="pt", return_dict=True)
        answer_ids = model.generate(**ids, max_new_tokens=80, do_sample=False)[0, ids["input_ids"].shape[1] :]
        is_equal = tokenizer.decode(answer_ids, skip_special_tokens=True) == answer["content"]
        correct += is_equal and int(answer_ids[-1]) == tokenizer.eos_token_id
    return correct / len(conversations)


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
    share = score(model, tokenizer, held_out)
    print(f"{share:.1%} of questions on held-out messages are answered")
    return muon.save_if_good(model, tokenizer, folder, share, GATE_SHARE, max_new_tokens=96)


if __name__ == "__main__":
    raise SystemExit(main(Path(sys.argv[1]) if len(sys.argv) > 1 else BUNDLED / "tiny-base"))
