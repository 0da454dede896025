"""A run's model card: base, licence, recipe, data by their fingerprint, scores with intervals, forecast against measured.

It has no row of the data, no path and no name of this machine: local paths are shortened to their last part.
"""

from __future__ import annotations

import getpass
import os
import re
import socket
from pathlib import Path
from typing import Any

from finetune import __version__
from finetune.errors import SECRET, FinetuneError, RecipeError
from finetune.evaluate.paired import Difference, format_difference
from finetune.evaluate.results import read_evaluations, read_forgetting, unreadable_evaluations
from finetune.events import ForecastCheck, read_events
from finetune.files import read_object
from finetune.hub import REPO_ID, cached_file
from finetune.model.configuration import resolve_model_path
from finetune.planner.plan import Plan, read_plan
from finetune.recipe import parse_recipe, yaml
from finetune.run.base_adapter import base_adapter_of
from finetune.run.directory import RunDirectory
from finetune.run.seal import MANIFEST, changes_in
from finetune.settings.base_formats import base_format_of
from finetune.units import format_bytes

CARD = "README.md"
#: Recipe settings about this machine or network, which don't change what is learnt.
_LOCAL_SETTINGS = ("output_dir", "memory_budget", "host_memory", "gpu", "report_to", "launch", "price_per_hour")
#: An absolute path, and a path in a home folder.
_ABSOLUTE_PATH = re.compile(r"(?<![\w:/.<-])(?:/(?:[\w.+@-]+/)+[\w.+@-]+|[A-Za-z]:\\[^\s\"']+)")
_HOME_PATH = re.compile(r"(?:/home|/Users|[A-Za-z]:\\+Users)[/\\]+[^\s\"'/\\]+|/root/[^\s\"']+")
#: Names of users and machines that identify nobody.
_COMMON_NAMES = {"root", "user", "users", "home", "admin", "ubuntu", "debian", "localhost", "app", "work", "runner"}


def model_card(run: RunDirectory, kind: str) -> str:
    """README.md for the hub; `kind`: adapter, merged or gguf. Raises FinetuneError if the text has something private."""
    plan = read_plan(run.plan)
    sections = {
        f"# {_title(plan, kind)}": _description(run, plan, kind), "## Training": _training(run), "## Data": _data(run),
        "## Evaluation": _evaluation(run), "## Forecast and measured memory": _memory(run, plan),
    }  # fmt: skip
    body = "\n\n".join(f"{title}\n\n{text}" for title, text in sections.items() if text)
    text = f"---\n{yaml.dump(_metadata(plan, kind))}---\n\n{body}\n"
    for name in _private_names():
        text = re.sub(rf"(?<![\w/-]){re.escape(name)}(?![\w-])", "user", text, flags=re.I)
    require_nothing_private("the model card", text, every_path=True)
    return text


def require_nothing_private(name: str, text: str, *, every_path: bool = False) -> None:
    """Raise FinetuneError if a text has a token, which is not repeated, or a path of this machine."""
    if SECRET.search(text):
        raise FinetuneError(f"{name} has something that looks like a token; nothing was sent", "Remove it there.")
    if match := (_ABSOLUTE_PATH if every_path else _HOME_PATH).search(text):
        raise FinetuneError(f"{name} has the path {match[0]!r} of this machine; nothing was sent", "Remove it there.")


def without_local_paths(value: Any, key: str = "") -> Any:
    """JSON values in which settings with a path on this machine have only its last part."""
    if isinstance(value, dict):
        return {name: without_local_paths(item, name) for name, item in value.items()}
    if isinstance(value, list):
        return [without_local_paths(item, key) for item in value]
    return last_part(value) if isinstance(value, str) and key.endswith(("path", "_file", "template")) else value


def last_part(text: str) -> str:
    """The name at the end of a local path; a hub id and other text unchanged."""
    if REPO_ID.fullmatch(text) and not Path(text).exists():
        return text
    is_path = "\n" not in text and len(text) < 4096 and re.match(r"[/~.]|[A-Za-z]:\\", text)
    exists = "/" in text and os.path.exists(text)  # noqa: PTH110 - Path's raises OSError for a text that is no name
    return re.split(r"[/\\]", text.rstrip("/\\"))[-1] if is_path or exists else text


def _private_names() -> list[str]:
    """Names of this user and machine that may identify somebody."""
    try:
        names = {getpass.getuser(), Path.home().name, socket.gethostname().partition(".")[0]}
    except (OSError, KeyError, RuntimeError):
        names = set()
    return sorted(name for name in names if len(name) > 2 and name.lower() not in _COMMON_NAMES)


def _metadata(plan: Plan, kind: str) -> dict[str, Any]:
    """The hub's front matter: only what is known."""
    settings, dataset = plan.settings, plan.settings.dataset
    base_model, licence = settings.model_name_or_path, licence_of(plan)
    paths = [dataset.path] if isinstance(dataset.path, str) else dataset.path
    on_hub = [path for path in paths if REPO_ID.fullmatch(path) and not Path(path).exists()]
    relation = {"adapter": "adapter", "merged": "finetune", "gguf": "quantized"}[kind]
    library_name = {"adapter": "peft", "merged": "transformers", "gguf": "gguf"}[kind]
    is_on_hub = REPO_ID.fullmatch(base_model) and not Path(base_model).exists()
    return {
        **({"license": licence} if licence else {}),
        **({"base_model": base_model, "base_model_relation": relation} if is_on_hub else {}),
        **({"datasets": on_hub} if on_hub else {}),
        "library_name": library_name, "pipeline_tag": "text-generation", "tags": ["lora", "sft"],
    }  # fmt: skip


def licence_of(plan: Plan) -> str | None:
    """The licence in the base model's own card, if that is on this disk."""
    try:
        path_or_id = resolve_model_path(plan.settings)
    except RecipeError:  # the base model is gone
        return None
    folder = Path(path_or_id)
    readme = folder / CARD if folder.is_dir() else cached_file(path_or_id, CARD, plan.settings.model_revision)
    try:
        text = readme.read_text(encoding="utf-8") if readme else ""
    except OSError:
        return None
    front_matter = text.split("---", 2)[1] if text.startswith("---") and text.count("---") > 1 else ""
    match = re.search(r"^license:\s*['\"]?([\w.+-]+)", front_matter, re.M)
    return match[1] if match else None


def _title(plan: Plan, kind: str) -> str:
    form = {"adapter": "LoRA adapter", "merged": "merged model", "gguf": "GGUF"}[kind]
    return f"{last_part(plan.settings.model_name_or_path)}, fine-tuned: {form}"


def _description(run: RunDirectory, plan: Plan, kind: str) -> str:
    settings, licence = plan.settings, licence_of(plan)
    base = last_part(settings.model_name_or_path)
    revision = f" at revision {settings.model_revision}" if settings.model_revision else ""
    base_format = base_format_of(settings)
    weights = base_format.title if base_format.setting else settings.dtype
    lines = [
        f"Base model: {base}{revision}.",
        f"Licence: {licence}, by the base model's card." if licence else "Licence: the base model's, which is unknown here.",
        f"Trained with rank {settings.lora_r}, alpha {settings.lora_alpha:g}, on {weights} weights.",
    ]
    values = read_object(run.adapter / MANIFEST) or {}
    if values.get("step"):
        loss = f", held-out loss {values['eval_loss']:.4f}" if values.get("eval_loss") is not None else ""
        lines.append(f"Step {values['step']:,} of {plan.total_steps or 0:,}{loss}.")
    if (origin := base_adapter_of(run)) is not None:
        lines.append(f"Training continued another adapter, {last_part(origin.name)}.")
    if kind == "merged":
        lines.append("The adapter is added to the base model's 16-bit weights.")
    return "\n".join(lines)


def _training(run: RunDirectory) -> str:
    """The recipe, without local paths."""
    recipe = parse_recipe(run.recipe.read_text(encoding="utf-8"), str(run.recipe))
    values = recipe.model_dump(exclude_unset=True, mode="json")
    values = {name: value for name, value in values.items() if name not in _LOCAL_SETTINGS}
    for name in ("model_name_or_path", "adapter_name_or_path", "chat_template"):
        if isinstance(values.get(name), str):
            values[name] = last_part(values[name])
    dataset = values["dataset"]
    for name in ("path", "eval_path"):
        paths = dataset.get(name)
        if paths is not None:
            dataset[name] = [last_part(path) for path in paths] if isinstance(paths, list) else last_part(paths)
    return f"With finetune {__version__}:\n\n```yaml\n{yaml.dump(values)}```"


def _data(run: RunDirectory) -> str:
    """Number of rows and tokens, and the fingerprint; no row."""
    path = run.data / "report.json"
    changes = changes_in(run.data, required=False, only=path.name)
    report = {} if changes else read_object(path) or {}
    lines = [f"- {change}" for change in changes]
    for name, split_report in (("training", report), ("held out", report.get("eval_report") or {})):
        if split_report.get("rows_used") is not None:
            lines.append(f"- {name}: {split_report['rows_used']:,} rows, {split_report.get('total_tokens') or 0:,} tokens")
    try:
        fingerprint = (run.data / "fingerprint").read_text(encoding="utf-8").strip()
    except OSError:
        fingerprint = ""
    if fingerprint:
        lines.append(f"- fingerprint of the tokenised rows: `{fingerprint}`")
    return "\n".join(lines)


def _evaluation(run: RunDirectory) -> str:
    """Every evaluation so far: scores and differences with their intervals, no row."""
    sections = [_scores_table(values) for values in read_evaluations(run).values()]
    if forgetting := read_forgetting(run):
        rows = [f"- {result['rows_of']} ({result['rows']:,} rows): {_loss_difference(result)}" for result in forgetting]
        sections.append("Forgetting (loss per trained token):\n\n" + "\n".join(rows))
    if damaged := unreadable_evaluations(run):
        sections.append(f"{damaged}.")
    return "\n\n".join(sections) or "Not evaluated."


def _loss_difference(result: dict[str, Any]) -> str:
    difference = result.get("difference")
    return format_difference(Difference(**difference) if difference else None, names="loss now - before")


def _scores_table(values: dict[str, Any]) -> str:
    base, tuned = values["base"], values["tuned"]
    names = ("before", "now") if values.get("forgetting") or values.get("against_adapter") else ("base", "tuned")
    rows_name = f"rows of {last_part(values['data'])}" if values.get("data") else "held-out rows"
    rows_name += " of the run that it continued" if values.get("forgetting") else ""
    rows = [f"| {values['rows']:,} {rows_name} | {names[0]} | {names[1]} | difference |", "|---|---|---|---|"]
    percent, number = ".1%", ".4f"
    metrics = [
        ("exact match", "exact_match", percent, 100.0, " points", "exact_match_difference"),
        (values["score"], "score", number, 1.0, "", "score_difference"),
        ("pairs in order", "pairs_in_order", percent, 100.0, " points", "pairs_in_order_difference"),
        ("loss per trained token", "loss", number, 1.0, "", "loss_difference"),
        ("perplexity", "perplexity", number, 1.0, "", ""), ("token accuracy", "token_accuracy", percent, 1.0, "", ""),
    ]  # fmt: skip
    for name, key, form, scale, unit, difference_key in metrics:
        if tuned.get(key) is None or base.get(key) is None or (key == "score" and values["score"] in ("exact", "loss")):
            continue
        gap = values.get(difference_key) if difference_key else None
        difference = format_difference(Difference(**gap), scale, unit, " - ".join(reversed(names))) if gap else ""
        rows.append(f"| {name} | {base[key]:{form}} | {tuned[key]:{form}} | {difference} |")
    return "\n".join(rows)


def _memory(run: RunDirectory, plan: Plan) -> str:
    """Allocated memory: forecast and measured."""
    rows = []
    for event in read_events(run.events):
        if isinstance(event, ForecastCheck) and event.predicted_allocated_bytes and event.measured_allocated_bytes:
            forecast, measured = event.predicted_allocated_bytes, event.measured_allocated_bytes
            rows.append(
                f"| {event.at} | {format_bytes(forecast)} | {format_bytes(measured)} | {measured / forecast - 1:+.1%} |"
            )
    if not rows:
        peak = format_bytes(plan.forecast.peak_bytes) if plan.forecast else None
        return f"Forecast: {peak} at the peak; not measured." if peak else ""
    return "\n".join(["| allocated memory | forecast | measured | difference |", "|---|---|---|---|", *rows])
