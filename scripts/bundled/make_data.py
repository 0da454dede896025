"""Writes the bundled datasets: `support`, customer messages, each answered with one line of JSON that routes it; and
`support-pairs`, messages on topics that `support` lacks, each with the queue that is preferred and another. No dependencies.

A message is synthetic: one sentence on the topic, at most one on the urgency, and the phrases that people write around them.

    python scripts/bundled/make_data.py [FOLDER]

Writes support/ and support-pairs/, with train.jsonl and eval.jsonl each, into FOLDER (default: finetune/bundled): the same
bytes each time.
"""

from __future__ import annotations

import json
import random
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

TRAIN_ROWS, EVAL_ROWS, SEED = 900, 120, 20260
#: Training rows of the pairs, and the seed of their messages.
PAIRS, PAIRS_SEED = 450, 20261
INSTRUCTION = "Route this message:"
BUNDLED = Path(__file__).resolve().parents[2] / "finetune" / "bundled"

#: Sentences, words and answers, by what they are for.
PARTS: dict[str, Any] = json.loads(Path(__file__).with_name("messages.json").read_text(encoding="utf-8"))
#: Article -> the nouns customers use for it.
ARTICLES: dict[str, list[str]] = PARTS["articles"]
NO_ARTICLE = "none"
#: Topic -> sentences that say it. {item} is an article with its determiner, {noun} without, {device} an electric one.
TOPICS: dict[str, list[str]] = PARTS["topics"]
#: Topics that only the pairs have: the fine-tune's rows never say where these go.
NEW_TOPICS: dict[str, list[str]] = PARTS["new_topics"]
#: The customer's words about urgency; "usual" has none, or other words.
URGENCY: dict[str, list[str]] = PARTS["urgency"]
#: The queue of each topic.
QUEUES: dict[str, str] = PARTS["queues"]
#: The queue that is preferred for each topic of the pairs, and the one that isn't. Each queue is as often in both.
PREFERRED: dict[str, list[str]] = PARTS["preferred"]
PRIORITIES: dict[str, str] = PARTS["priorities"]
PRODUCTS = {article: article.replace(" ", "-") for article in (*ARTICLES, NO_ARTICLE)}


@dataclass(frozen=True)
class Message:
    """A customer's message and its labels: keys of TOPICS and URGENCY, a key of ARTICLES or NO_ARTICLE."""

    text: str
    topic: str
    article: str
    urgency: str


def draw_message(rng: random.Random, topics: dict[str, list[str]] = TOPICS) -> Message:
    """Draw a message; all topics are equally likely, and so are articles and urgencies within a topic."""
    topic = rng.choice(list(topics))
    article = NO_ARTICLE if topic in PARTS["topics_without_article"] else rng.choice(list(ARTICLES))
    urgency = rng.choice(list(URGENCY))
    slots = _slots(rng, topic, article)
    templates = [text for text in topics[topic] if article not in PARTS["not_electric"] or "{device}" not in text]
    main_sentence = _fill(rng.choice(templates), slots, rng)
    sentences = [main_sentence[0].upper() + main_sentence[1:]]
    if rng.random() < 0.4:
        sentences.insert(rng.choice((0, 1)), _fill(rng.choice(PARTS["asides"]), slots, rng))
    urgency_sentence = _fill(rng.choice(URGENCY[urgency]), slots, rng)
    if urgency_sentence:
        sentences.insert(len(sentences) if rng.random() < 0.8 else 0, urgency_sentence)
    if rng.random() < 0.5:
        sentences.insert(0, rng.choice(PARTS["greetings"]))
    if rng.random() < 0.4:
        sentences.append(_fill(rng.choice(PARTS["closings"]), slots, rng))
    return Message(_with_typing_style(" ".join(sentences), rng), topic, article, urgency)


def draw_messages(rng: random.Random, count: int, excluded: set[str], topics: dict[str, list[str]] = TOPICS) -> list[Message]:
    """Draw `count` messages whose texts are not in `excluded`, and add the texts there."""
    messages: list[Message] = []
    while len(messages) < count:
        message = draw_message(rng, topics)
        if message.text not in excluded:
            excluded.add(message.text)
            messages.append(message)
    return messages


def _slots(rng: random.Random, topic: str, article: str) -> dict[str, str]:
    noun = rng.choice(ARTICLES[article]) if article != NO_ARTICLE else ""
    determiner = "the" if topic in PARTS["topics_before_buying"] else rng.choice(("the", "the", "my", "the new"))
    return {"noun": noun, "item": f"{determiner} {noun}", "device": f"{determiner} {noun}"}


def _fill(template: str, slots: dict[str, str], rng: random.Random) -> str:
    numbers = {
        "amount": f"{rng.randint(12, 389)}.{rng.choice(('00', '50', '90', '99'))} euros",
        "order": rng.randint(10000, 99999),
        "many": rng.choice((10, 15, 20, 25, 30, 40, 50)),
    }
    return template.format(
        **slots, **numbers, day=rng.choice(PARTS["days"]), count=rng.choice(PARTS["counts"]), name=rng.choice(PARTS["names"])
    )


def _with_typing_style(text: str, rng: random.Random) -> str:
    """Some people don't use capitals, some don't use apostrophes."""
    style = rng.random()
    if style < 0.08:
        return text.lower()
    return text.replace("'", "") if style < 0.14 else text


def route(message: Message, queue: str | None = None) -> str:
    """The answer: one line of JSON, with the queue of the topic if no other is given. Safety is high priority whatever the
    customer says about the time."""
    priority = "high" if message.topic == "safety" else PRIORITIES[message.urgency]
    return json.dumps({"queue": queue or QUEUES[message.topic], "priority": priority, "product": PRODUCTS[message.article]})


def rows() -> tuple[list[dict[str, list[dict[str, str]]]], list[dict[str, list[dict[str, str]]]]]:
    """Training and held-out rows in `messages` form; no message is in both."""
    messages = draw_messages(random.Random(SEED), TRAIN_ROWS + EVAL_ROWS, excluded=set())
    return [_row(message) for message in messages[:TRAIN_ROWS]], [_row(message) for message in messages[TRAIN_ROWS:]]


def bundled_texts() -> set[str]:
    """Every message of the dataset; the base model is trained without them."""
    return {message.text for message in draw_messages(random.Random(SEED), TRAIN_ROWS + EVAL_ROWS, excluded=set())}


def pairs() -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """Training and held-out pairs on topics that `support` lacks: a queue is preferred to another, all else is equal."""
    messages = draw_messages(random.Random(PAIRS_SEED), PAIRS + EVAL_ROWS, set(), NEW_TOPICS)
    every = [_pair(message) for message in messages]
    return every[:PAIRS], every[PAIRS:]


def write(folder: Path) -> None:
    """Write all files as UTF-8 with LF line ends."""
    for dataset, splits in (("support", rows()), ("support-pairs", pairs())):
        (folder / dataset).mkdir(parents=True, exist_ok=True)
        for name, split_rows in zip(("train.jsonl", "eval.jsonl"), splits, strict=True):
            lines = "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in split_rows)
            (folder / dataset / name).write_text(lines, encoding="utf-8", newline="\n")


def _row(message: Message) -> dict[str, list[dict[str, str]]]:
    question = {"role": "user", "content": f"{INSTRUCTION} {message.text}"}
    return {"messages": [question, {"role": "assistant", "content": route(message)}]}


def _pair(message: Message) -> dict[str, Any]:
    chosen, rejected = ([{"role": "assistant", "content": route(message, queue)}] for queue in PREFERRED[message.topic])
    return {"prompt": [{"role": "user", "content": f"{INSTRUCTION} {message.text}"}], "chosen": chosen, "rejected": rejected}


if __name__ == "__main__":
    write(Path(sys.argv[1]) if len(sys.argv) > 1 else BUNDLED)
