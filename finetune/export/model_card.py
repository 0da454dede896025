"""Write the README.md that `finetune push` sends: facts and scores, without rows and paths."""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import Any

from finetune.errors import SECRET, FinetuneError
from finetune.evaluate import results
from finetune.events import ForecastCheck, read_events
from finetune.export.targets import TARGETS
from finetune.files import MANIFEST, read_object
from finetune.hub import REPO_ID
from finetune.model.configuration import card_value
from finetune.planner.plan import Plan, read_plan
from finetune.recipe import yaml
from finetune.run.base_adapter import base_adapter_of
from finetune.run.directory import RunDirectory
from finetune.units import format_bytes

CARD = "README.md"
_ABSOLUTE_PATH = re.compile(r"(?<![\w:/.<-])(?:/(?:[\w.+@-]+/)+[\w.+@-]+|[A-Za-z]:\\[^\s\"']+)")
_HOME_PATH = re.compile(r"(?:/home|/Users|[A-Za-z]:\\+Users)[/\\]+[^\s\"'/\\]+|/root/[^\s\"']+")


def model_card(run: RunDirectory, kind: str) -> str:
    """Return the model card of a kind of result. Raise FinetuneError for a token or path."""
    plan = read_plan(run.plan)
    title = f"{last_path_part(plan.settings.model_name_or_path)}, fine-tuned: {TARGETS[kind].title}"
    body = f"# {title}\n\n{_description(run, plan, kind)}\n\n## Evaluation\n\n{_evaluation(run)}"
    text = f"---\n{yaml.dump(_metadata(plan, kind))}---\n\n{body}\n"
    require_nothing_private("the model card", text, every_path=True)
    return text


def require_nothing_private(name: str, text: str, *, every_path: bool = False) -> None:
    """Raise FinetuneError for a token or local path."""
    if SECRET.search(text):
        raise FinetuneError(f"{name} has something that looks like a token; nothing was sent", "Remove it there.")
    # `every_path`: any absolute path, else only paths in a home folder
    if match := (_ABSOLUTE_PATH if every_path else _HOME_PATH).search(text):
        raise FinetuneError(f"{name} has the path {match[0]!r} of this machine; nothing was sent", "Remove it there.")


def without_local_paths(value: Any, key: str = "") -> Any:
    """Shorten local paths in JSON values to their last part."""
    if isinstance(value, dict):
        return {name: without_local_paths(item, name) for name, item in value.items()}
    if isinstance(value, list):
        return [without_local_paths(item, key) for item in value]
    return last_path_part(value) if isinstance(value, str) and key.endswith(("path", "_file", "template")) else value


def last_path_part(text: str) -> str:
    """Return the last part of a local path; other text unchanged."""
    is_path = "\n" not in text and len(text) < 4096 and re.match(r"[/~.]|[A-Za-z]:\\", text)
    exists = "/" in text and os.path.exists(text)  # noqa: PTH110 - Path's raises OSError for a text that is no name
    return re.split(r"[/\\]", text.rstrip("/\\"))[-1] if is_path or exists else text


def _metadata(plan: Plan, kind: str) -> dict[str, Any]:
    settings, target = plan.settings, TARGETS[kind]
    name, path = settings.model_name_or_path, settings.dataset.path
    values = {
        "license": card_value(settings, "license"), "base_model": name if _is_on_hub(name) else None,
        "base_model_relation": target.relation if _is_on_hub(name) else None,
        "datasets": [*filter(_is_on_hub, path if isinstance(path, list) else [path])],
        "library_name": target.library, "pipeline_tag": "text-generation", "tags": ["lora", settings.method],
    }  # fmt: skip
    return {key: value for key, value in values.items() if value}


def _is_on_hub(name: str) -> bool:
    return bool(REPO_ID.fullmatch(name)) and not Path(name).exists()


def _description(run: RunDirectory, plan: Plan, kind: str) -> str:
    settings, adapter = plan.settings, read_object(run.adapter / MANIFEST) or {}
    weights = settings.base_format
    revision = f" at revision {settings.model_revision}" if settings.model_revision else ""
    loss = adapter.get("eval_loss")
    origin, licence = base_adapter_of(run), card_value(settings, "license")
    lines = [
        f"Base model: {last_path_part(settings.model_name_or_path)}{revision}.",
        f"Licence: {licence}, by the base model's card." if licence else "Licence: the base model's, which is unknown here.",
        f"Trained with rank {settings.lora_r}, alpha {settings.lora_alpha:g}, "
        f"on {weights.title if weights.setting else settings.dtype} weights.",
    ]
    if step := adapter.get("step"):
        lines.append(f"Step {step:,} of {plan.total_steps or 0:,}{'' if loss is None else f', held-out loss {loss:.4f}'}.")
    checks = [event for event in read_events(run.events) if isinstance(event, ForecastCheck)]
    if checks and (forecast := checks[-1].predicted_allocated_bytes) and (peak := checks[-1].measured_allocated_bytes):
        lines.append(f"Allocated memory at the peak: {format_bytes(peak)}, forecast {format_bytes(forecast)}.")
    if origin is not None:
        lines.append(f"Training continued the adapter {last_path_part(origin.name)}.")
    if results.answers_without_thoughts(run):
        lines.append("It answers without a thought: ask it with enable_thinking=False where the chat template has that.")
    if kind == "merged":
        lines.append("The adapter is merged into the base model's 16-bit weights.")
    return "\n".join(lines)


def _evaluation(run: RunDirectory) -> str:
    sections = [_scores_table(values) for values in results.read_evaluations(run).values()]
    if forgetting := results.read_forgetting(run):
        sections.append(f"Forgetting (loss per trained token): {forgetting.summary()}")
    if damaged := results.unreadable_evaluations(run):
        sections.append(f"{damaged}.")
    return "\n\n".join(sections) or "Not evaluated."


def _scores_table(values: dict[str, Any]) -> str:
    first, second = ("before", "now") if values["against_adapter"] else ("base", "tuned")
    rows_of = f"rows of {last_path_part(values['data'])}" if values["data"] else "held-out rows"
    rows = [f"| {values['rows']:,} {rows_of} | {first} | {second} | difference |", "|---|---|---|---|"]
    rows += [
        f"| {figure.title} | {' | '.join(figure.values)} | {figure.gap if figure.difference else ''} |"
        for figure in results.measures(values)
    ]
    return "\n".join(rows)
