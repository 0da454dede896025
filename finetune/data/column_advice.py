"""Suggest the columns of questions and answers by their usual names."""

from __future__ import annotations

from finetune.data.checks import Values, is_missing
from finetune.data.column_semantics import words_of

#: Last words of the names of columns with questions, and with answers; usual words first.
_QUESTIONS = "question query instruction prompt input problem request user human message source document article dialogue"
_ANSWERS = "answer response output completion reply solution assistant bot target summary translation"


def suggested_columns(rows: list[Values]) -> dict[str, str]:
    """Return the columns of instruction and output: by name, or the only two columns of text. Empty if unclear."""
    columns = dict.fromkeys(name for row in rows for name in row if "system" not in name.lower())
    texts = [name for name in columns if {type(row[name]) for row in rows if not is_missing(row.get(name))} == {str}]
    question, answer = _named(texts, _QUESTIONS), _named(texts, _ANSWERS)
    if len(texts) == 2:
        question = question or next(name for name in texts if name != answer)
        answer = answer or next(name for name in texts if name != question)
    return {"instruction": question, "output": answer} if question and answer else {}


def _named(texts: list[str], terms: str) -> str | None:
    # the shortest name wins: `question` before `follow_up_question`
    name_of_word = {words_of(name)[-1]: name for name in sorted(texts, key=len, reverse=True)}
    return next((name_of_word[term] for term in terms.split() if term in name_of_word), None)
