"""What the engine writes into events, plans and results, in the language of the page.

The engine writes English. A text that is one of these, with its values, has a translation; any other stays as it is.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from functools import cache

from ..language import catalogue, current, mark, tr
from .markup import as_on_page

#: Characters of a text that is translated with more than one value; with more than two, for each letter of the longest part.
_LONGEST, _PER_LETTER = 500, 50
_NAMES = re.compile(r"(\S+(?:, \S+)*) (and|or) (\S+)")
_LETTER, _MARK = re.compile("[A-Za-z]"), re.compile("[:;] ")
_VALUE = re.compile(r"\{(\w+)\}")
_TEXTS = (
    # states of a run
    mark("not started yet"), mark("waiting for {run}; {n} ahead in the queue"), mark("its process is gone"),
    mark("{path} was deleted"), mark("stopped at step {step} with a checkpoint"),
    mark("{reason}; resume with: {command}"),
    mark("adapter in {path}: best at step {step} of {total}; since then held-out loss rose {percent}. The last step's ({last}) "
         "is in {last_path}"),
    mark("adapter in {path}: best at step {step} of {total}. The last step's ({last}) is in {last_path}"),
    mark("stopped early at step {step} of {total}, after {n} evaluations without a lower held-out loss; {result}"),
    mark("ended at step {step} of {total}, as asked; {result}"), mark("adapter in {path}"),
    mark("{name} is {value} at step {step} {checkpoint} Usual causes: the learning rate ({rate}; try learning_rate: {lower}), "
         "fp16, or broken rows."),
    mark("The last good checkpoint is {checkpoint}."), mark("There is no checkpoint yet."),
    mark("{reason}, after {n} attempts"), mark("out of memory in phase {phase}"),
    mark("layer offloading: each token of an answer moves {size}: about {seconds} s"),
    # why memory ran out
    mark("{size} were asked for in phase {phase}, {more} more could be reserved."),
    mark("{size} were asked for in phase {phase}."),
    mark("{size} were asked for, {more} more could be reserved."), mark("{size} were asked for."),
    mark("Memory ran out in phase {phase}."), mark("Memory ran out."),
    mark("Fragmentation: {size} of reserved memory are free, in {n} pieces, of which the largest that this request may use has "
         "{usable}; together they would have sufficed. packing: true or rows of similar length reduce it."),
    mark("{size} of reserved memory are free, in {n} pieces, one of them large enough by now: what failed has been freed "
         "since."),
    mark("{size} of reserved memory are free, in {n} pieces; the largest, {largest}, belongs to another stream or to small "
         "requests."),
    mark("{size} of reserved memory are free, in {n} pieces, the largest {largest}."),
    mark("{size} of reserved memory are free, in {n} pieces, too little together."), mark("No reserved memory is free."),
    mark("The plan expected {allocated} allocated and {reserved} reserved at most; {peak} were allocated and {peak_reserved} "
         "reserved, more than forecast."),
    mark("The plan expected {allocated} allocated and {reserved} reserved at most; {peak} were allocated and {peak_reserved} "
         "reserved before it failed."),
    mark("The plan expected {allocated} allocated at most; {peak} were allocated, more than forecast."),
    mark("The plan expected {allocated} allocated at most; {peak} were allocated before it failed."),
    mark("Most of the allocated memory: {parts}."),
    # phases
    mark("load"), mark("train"), mark("evaluate"), mark("save"),
    # metrics of training methods
    mark("answers in order"), mark("reward margin"), mark("reward of chosen"), mark("reward of rejected"), mark("KL"),
    mark("loss"), mark("grad_norm"),
    # scores and their differences
    mark("{value} points"),
    mark("queries that run"), mark("valid Python"), mark("valid JSON"), mark("not measured"), mark("general questions"),
    mark("now"), mark("before"), mark("tuned"), mark("base"),
    mark("{model} - {other} {value} (95 % interval {low} to {high})"), mark("can't tell yet: {difference}"),
    mark("can't tell yet; about {n} more rows would: {difference}"),
    mark("questions with tools, none due ({n}): answered without a call {before} before, {now} now; {difference}"),
    # sweeps
    mark("of the worse half, arms are dropped whose held-out loss is surely higher than the best arm's (95 % interval of a "
         "paired bootstrap over the same rows) and that are no neighbours of it in the grid; arms that diverge are dropped at "
         "once"),
    mark("no arm has a held-out loss yet"), mark("{arm} wins with a held-out loss of {loss} after step {step}"),
    mark("{arm} leads with a held-out loss of {loss} after step {step}"), mark("can't be told apart from it: {arms}"),
    mark("not compared row by row: {arms}"), mark("surely behind: {arm}, by {value} (95 % interval {low} to {high})"),
)  # fmt: skip


def of_engine(text: str) -> str:
    """The engine's text in this request's language, with those of its values that are such texts; settings as in a recipe."""
    return translated(text, _TEXTS)


def translated(text: str, templates: tuple[str, ...]) -> str:
    """A text that is one of these templates, in this request's language, and those of its values that are such texts."""
    text = as_on_page(text)
    return text if current() == "en" else matched(text, templates, catalogue(current()))


def matched(text: str, templates: tuple[str, ...], translations: Mapping[str, str], depth: int = 3) -> str:
    """A text that is one of these templates, translated with those of its values that are such texts.

    Of several that match, the one that leaves least in English. `depth`: of texts within texts.
    """
    trimmed = text.strip()
    best, least = _listed(trimmed), english(trimmed)
    for template, values in _matches(trimmed, templates) if depth else ():
        own = {name: matched(value, templates, translations, depth - 1) for name, value in values.items()}
        translation = _VALUE.sub(lambda match: own[match[1]], translations.get(template, template))  # noqa: B023 - called at once
        if template == trimmed:
            return text.replace(trimmed, translation, 1)
        if (left := english(translation)) < least and left[0] < english(trimmed)[0]:
            best, least = translation, left
    return text.replace(trimmed, best, 1)


def _matches(text: str, templates: tuple[str, ...]) -> Iterator[tuple[str, dict[str, str]]]:
    """The templates that the whole text is, each with its values by name.

    A long text has an exception's message: there a template with several values, and little beside them, takes long to match.
    """
    for template, part in _by_part(templates):
        values = template.count("{")
        if values > 1 and len(text) > _LONGEST or values > 2 and len(text) > _PER_LETTER * len(part):
            continue
        if part in text and (match := _pattern(template).fullmatch(text)):
            yield template, match.groupdict()


def english(text: str) -> tuple[int, int]:
    """How much of a text is English: its letters, and its marks that Chinese writes otherwise."""
    return len(_LETTER.findall(text)), len(_MARK.findall(text))


def _listed(text: str) -> str:
    """A list of names, such as `sft, dpo or kto`; any other text as it is."""
    match = _NAMES.fullmatch(text)
    return f"{match[1]}{tr(' and ') if match[2] == 'and' else tr(' or ')}{match[3]}" if match else text


@cache
def _by_part(templates: tuple[str, ...]) -> list[tuple[str, str]]:
    """Each text with its longest part without a value; texts without values first."""
    ordered = sorted(templates, key=lambda template: "{" in template)
    return [(template, max(_VALUE.split(template)[::2], key=len)) for template in ordered]


@cache
def _pattern(template: str) -> re.Pattern[str]:
    return re.compile(re.sub(r"\\\{(\w+)\\\}", r"(?P<\1>.*?)", re.escape(template)), re.S)
