"""Writes the bundled datasets: `support`, customer messages, each answered with one line of JSON that routes it; and
`support-pairs`, messages on topics that `support` lacks, each with the queue that is preferred and another. No dependencies.

    python scripts/bundled/make_data.py [FOLDER]

Writes support/ and support-pairs/, with train.jsonl and eval.jsonl each, into FOLDER (default: finetune/bundled): the same
bytes each time.
"""

from __future__ import annotations

import json
import random
import sys
from pathlib import Path
from typing import Any

from messages import ARTICLES, NEW_TOPICS, NO_ARTICLE, PARTS, Message, draw_messages

TRAIN_ROWS, EVAL_ROWS, SEED = 900, 120, 20260
#: Training rows of the pairs, and the seed of their messages.
PAIRS, PAIRS_SEED = 450, 20261
INSTRUCTION = "Route this message:"
BUNDLED = Path(__file__).resolve().parents[2] / "finetune" / "bundled"

#: The queue of each topic.
QUEUES: dict[str, str] = PARTS["queues"]
#: The queue that is preferred for each topic of the pairs, and the one that isn't. Each queue is as often in both.
PREFERRED: dict[str, list[str]] = PARTS["preferred"]
PRIORITIES: dict[str, str] = PARTS["priorities"]
PRODUCTS = {article: article.replace(" ", "-") for article in (*ARTICLES, NO_ARTICLE)}


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
