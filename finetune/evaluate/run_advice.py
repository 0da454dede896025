"""What earlier runs on the same rows and base model say: which setting moved the result, and which did not.

Only two runs that differ in a single setting say what that setting does. Where both were evaluated on the same rows, the change
has the interval of a paired bootstrap over these rows; otherwise it is that of the held-out loss, without an interval.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from finetune.evaluate.paired import Difference, difference
from finetune.evaluate.results import read_evaluations
from finetune.evaluate.scorers import span_of
from finetune.files import read_object
from finetune.run.directory import RunDirectory
from finetune.run.seal import MANIFEST
from finetune.settings.schema import Decides, settings_that_decide

#: How the seed is called among the settings: runs that differ in it alone show what chance does.
_SEED = "seed"
_LOSS, _TOKEN_LOSS = "held-out loss", "loss per trained token"
#: Settings that change what the held-out loss is: runs that differ in them are compared by their evaluations alone.
_OF_THE_LOSS = {
    "method", "beta", "loss_type", "label_smoothing", "sft_weight", "desirable_weight", "undesirable_weight", "train_on_inputs",
}  # fmt: skip


@dataclass(frozen=True)
class TrainedRun:
    """A run with a result: the settings that decide it, its held-out loss, and its evaluations by name."""

    run: RunDirectory
    settings: dict[str, Any]
    key: tuple[str, ...]  # hashes of rows, base model and continued adapter
    base: str
    loss: float | None
    evaluations: dict[str, dict[str, Any]]


@dataclass(frozen=True)
class SettingEffect:
    """Two runs that differ in one setting. `scores`: of the first and the second run; `difference`: second minus first."""

    setting: str
    values: tuple[Any, Any]
    runs: tuple[str, str]
    score: str
    scores: tuple[float, float]
    difference: Difference | None = None

    @property
    def change(self) -> float:
        """Score of the second run minus that of the first."""
        return self.scores[1] - self.scores[0]


@dataclass(frozen=True)
class RunAdvice:
    """Runs on the same rows and base model, what single settings changed, and which never changed alone.

    `losses`: held-out losses of the runs, the lowest first; all None where their settings make them different quantities.
    `noise`: the largest change of the loss between runs that differ in the seed alone; None without such runs.
    """

    base: str
    runs: list[str]
    losses: list[float | None]
    effects: list[SettingEffect]
    never_alone: list[str]
    noise: float | None

    def is_noise(self, effect: SettingEffect) -> bool:
        """Whether another seed changes as much, or the interval has zero in it."""
        if effect.difference is not None and not effect.difference.is_significant:
            return True
        return bool(self.noise and effect.score == _LOSS and effect.setting != _SEED and abs(effect.change) <= self.noise)


def advise(runs: Sequence[RunDirectory]) -> list[RunAdvice]:
    """For each group of two runs or more with the same rows and base model; the largest group first."""
    groups: dict[tuple[str, ...], list[TrainedRun]] = {}
    for run in runs:
        trained = _trained_run(run)
        if trained is not None:
            groups.setdefault(trained.key, []).append(trained)
    several = [group for group in groups.values() if len(group) > 1]
    return [_advice(group) for group in sorted(several, key=len, reverse=True)]


def _trained_run(run: RunDirectory) -> TrainedRun | None:
    """None for a run without a result, or of a version that wrote no facts with it."""
    manifest = read_object(run.adapter / MANIFEST) or {}
    facts, loss = manifest.get("facts"), manifest.get("eval_loss")
    if not isinstance(facts, dict) or "data" not in facts:
        return None
    ignored = {"dataset", "model_name_or_path", "model_revision", "adapter_name_or_path"}
    names = {*settings_that_decide(Decides.RESULT), "learning_rate", "early_stopping_patience"} - ignored
    settings = {name: facts[name] for name in sorted(names & facts.keys())}
    key = (str(facts["data"]), str(facts.get("base", facts.get("model_name_or_path"))), str(facts.get("origin")))
    held_out_loss = float(loss) if isinstance(loss, int | float) and math.isfinite(loss) else None
    base = str(facts.get("model_name_or_path"))
    return TrainedRun(run, settings, key, base, held_out_loss, read_evaluations(run))


def _advice(group: list[TrainedRun]) -> RunAdvice:
    ordered = sorted(group, key=lambda trained: math.inf if trained.loss is None else trained.loss)
    effects, changed, alone = [], set[str](), set[str]()
    for first, second in itertools.combinations(ordered, 2):
        all_names = first.settings.keys() | second.settings.keys()
        names = {name for name in all_names if first.settings.get(name) != second.settings.get(name)}
        changed |= names
        if len(names) == 1:
            alone |= names
            effects += _effects(*_in_order(first, second, *names), *names)
    changes = [abs(effect.change) for effect in effects if effect.setting == _SEED and effect.score == _LOSS]
    effects.sort(key=lambda effect: (effect.setting, effect.score, str(effect.values)))
    losses = [None if changed & _OF_THE_LOSS else trained.loss for trained in ordered]
    names_of_runs = [trained.run.path.name for trained in ordered]
    return RunAdvice(ordered[0].base, names_of_runs, losses, effects, sorted(changed - alone), max(changes, default=None))


def _in_order(first: TrainedRun, second: TrainedRun, setting: str) -> tuple[TrainedRun, TrainedRun]:
    """The run with the smaller value first, where values are numbers."""
    values = first.settings.get(setting), second.settings.get(setting)
    are_numbers = all(isinstance(value, int | float) for value in values)
    return (second, first) if are_numbers and values[0] > values[1] else (first, second)  # type: ignore[operator]


def _effects(first: TrainedRun, second: TrainedRun, setting: str) -> list[SettingEffect]:
    """The change of each score that both runs have on the same rows, and of the held-out loss."""
    values, names = (first.settings.get(setting), second.settings.get(setting)), (first.run.path.name, second.run.path.name)
    effects = []
    for name in first.evaluations.keys() & second.evaluations.keys():
        of_first, of_second = first.evaluations[name], second.evaluations[name]
        if any(of_first[key] != of_second[key] for key in ("prompts", "references")):
            continue
        scores = of_first["tuned"]["scores"], of_second["tuned"]["scores"]
        if len(scores[0]) > 1 and len(scores[0]) == len(scores[1]):
            means = (sum(scores[0]) / len(scores[0]), sum(scores[1]) / len(scores[1]))
            gap = difference(*scores, span=span_of(name, *scores))
            effects.append(SettingEffect(setting, values, names, name, means, gap))
        tokens = of_first["tuned"]["row_tokens"]
        if name in ("exact", "loss") and len(tokens) > 1 and any(tokens) and tokens == of_second["tuned"]["row_tokens"]:
            gap = difference(of_first["tuned"]["row_losses"], of_second["tuned"]["row_losses"], tokens)
            means = (of_first["tuned"]["loss"], of_second["tuned"]["loss"])
            effects.append(SettingEffect(setting, values, names, _TOKEN_LOSS, means, gap))
    if first.loss is not None and second.loss is not None and setting not in _OF_THE_LOSS:
        effects.append(SettingEffect(setting, values, names, _LOSS, (first.loss, second.loss)))
    return effects
