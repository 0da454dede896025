"""Synthetic customer-support messages with known topic, article and urgency. Standard library only.

A message has one sentence on the topic, at most one on the urgency, and the phrases that people write around them. Topic,
article and urgency are the labels; `make_data` and `pretraining` ask different questions about them.
"""

from __future__ import annotations

import json
import random
from dataclasses import dataclass
from pathlib import Path
from typing import Any

#: Sentences, words and answers, by what they are for.
PARTS: dict[str, Any] = json.loads(Path(__file__).with_suffix(".json").read_text(encoding="utf-8"))
#: Article -> the nouns customers use for it.
ARTICLES: dict[str, list[str]] = PARTS["articles"]
NO_ARTICLE = "none"
#: Topic -> sentences that say it. {item} is an article with its determiner, {noun} without, {device} an electric one.
TOPICS: dict[str, list[str]] = PARTS["topics"]
#: Topics that only the pairs have: the fine-tune's rows never say where these go.
NEW_TOPICS: dict[str, list[str]] = PARTS["new_topics"]
#: The customer's words about urgency; "usual" has none, or other words.
URGENCY: dict[str, list[str]] = PARTS["urgency"]


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
