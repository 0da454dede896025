"""Rows of a question and its answer in columns: what `eval` scores is what `chat` says."""

import json

import pytest

pytestmark = pytest.mark.slow


def test_after_twenty_steps_on_question_and_answer_columns_chat_says_what_eval_scored(make_run, train, tmp_path):
    from finetune.evaluate.answerer import Answerer
    from finetune.evaluate.score import compare

    towns = [f"{first}{last}" for first in ("Lyo", "Os", "Tur", "Cai", "Qui", "Kyo") for last in ("n", "lo", "in", "ro")]
    rows = [{"question": f"Which town is {town}?", "answer": f"It is {town}."} for town in towns]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    run = make_run(
        f"dataset.path={tmp_path / 'rows.jsonl'}", "dataset.test_split_size=4", "dataset.max_rows=null", "max_steps=20",
        "save_steps=0",
    )  # fmt: skip
    train.whole(run)
    scored, chat = compare(run), Answerer(run)
    examples = json.loads((run.data / "eval_examples.json").read_text())
    assert len(examples) == 4 and not chat.plain and any(scored.tuned.answers)
    for row, answer in zip(examples, scored.tuned.answers, strict=True):
        asked = chat.prompt_ids([{"role": "user", "content": row["prompt"]}])
        assert asked == row["prompt_ids"]
        [(reply, _)] = chat.answer([asked], max_new_tokens=128, with_special_tokens=False)
        assert reply.startswith(answer)
