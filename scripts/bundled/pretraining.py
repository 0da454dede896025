"""Training data of the tiny base model: questions about support messages, never the routing task. Standard library only."""

from __future__ import annotations

import json
import random
from collections.abc import Callable

from messages import ARTICLES, NO_ARTICLE, PARTS, Message, draw_messages

Conversation = list[dict[str, str]]

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
