"""BLEU, chrF and ROUGE-L of an answer against the expected one, by the libraries whose values are published."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable

from finetune.errors import PackagesError
from finetune.evaluate.scorers import RowScore
from finetune.requirements import DISTRIBUTION


def text_score(name: str) -> Callable[[str, str, str], RowScore]:
    """The score called bleu, chrf or rouge, of one row, from 0 to 1. Raises PackagesError without the extra `text`.

    Of BLEU it is the sentence's, with sacrebleu's smoothing: the mean of rows is not the corpus' BLEU.
    """
    module, package = ("rouge_score", "rouge-score") if name == "rouge" else ("sacrebleu", "sacrebleu")
    if not importlib.util.find_spec(module):
        problem = f"--score {name} needs {package}, which is not installed (the extra 'text' of {DISTRIBUTION})"
        raise PackagesError(problem, f"Install it: pip install {package}")
    if name == "rouge":
        from rouge_score.rouge_scorer import RougeScorer

        rouge = RougeScorer(["rougeL"])
        return lambda _, expected, answer: RowScore(rouge.score(expected, answer)["rougeL"].fmeasure)
    import sacrebleu

    sentence_score = sacrebleu.sentence_bleu if name == "bleu" else sacrebleu.sentence_chrf
    return lambda _, expected, answer: RowScore(min(1.0, sentence_score(answer, [expected]).score / 100))
