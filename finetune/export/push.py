"""Send a run's adapter, merged model or GGUF files to a hub repository, with a model card of facts and scores."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from huggingface_hub import CommitOperationAdd, HfApi, get_token
from huggingface_hub.errors import HfHubHTTPError, HFValidationError
from huggingface_hub.utils import disable_progress_bars

from finetune.data.report import first_line
from finetune.errors import SECRET, CommandError, FinetuneError, HubError
from finetune.evaluate import results
from finetune.events import ForecastCheck, read_events
from finetune.export import TARGETS
from finetune.files import MANIFEST, MAX_JSON_BYTES, parse_json, read_limited, read_object
from finetune.hub import REPO_ID, is_switched_off, require_repo_id
from finetune.model.configuration import card_value
from finetune.planner.plan import Plan, read_plan
from finetune.recipe import yaml
from finetune.run.base_adapter import base_adapter_of
from finetune.run.directory import RunDirectory
from finetune.run.seal import require_own_adapter
from finetune.units import Progress, format_bytes

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


#: Suffixes of files that programs load; a plan and a manifest describe this machine rather than the model.
_MODEL_SUFFIXES = {".json", ".safetensors", ".jinja", ".txt", ".model"}
_LOCAL_FILES = {"plan.json", "MANIFEST.json"}
#: Files of a vocabulary: no secrets are searched in them.
_VOCABULARIES = {"tokenizer.json", "vocab.json", "added_tokens.json", "merges.txt", "vocab.txt"}
_LOGIN = "Log in with a token that may write: hf auth login, or set HF_TOKEN."


@dataclass(frozen=True)
class HubFile:
    """A file to commit to the hub."""

    name: str
    source: Path | bytes  # local path or content

    @property
    def size_bytes(self) -> int:
        return len(self.source) if isinstance(self.source, bytes) else self.source.stat().st_size


def files_to_send(run: RunDirectory, kind: str, gguf: Sequence[str] = ()) -> list[HubFile]:
    """Return the checked files of `kind`, a key of TARGETS, with the model card.

    Raise CommandError for a missing file, FinetuneError for a token or local path in a file.
    """
    if kind == "gguf":
        paths = [Path(name) for name in gguf]
        if missing := [str(path) for path in paths if not (path.is_file() and path.suffix == ".gguf")]:
            raise CommandError(f"{', '.join(missing)}: not a GGUF file", "Export one: finetune export RUN")
    else:
        folder = run.path / TARGETS[kind].folder
        if kind == "adapter":
            require_own_adapter(run, folder, base=False)
        elif not (folder / "config.json").is_file():
            raise CommandError(f"{run.path} has no merged model", f"Merge it first: finetune merge {run.path}")
        model_files = [path for path in folder.iterdir() if path.is_file() and path.suffix in _MODEL_SUFFIXES]
        paths = [path for path in model_files if path.name not in _LOCAL_FILES]
    files = [HubFile(path.name, _shareable_content(path)) for path in paths]
    return sorted([*files, HubFile(CARD, model_card(run, kind).encode())], key=lambda file: file.name)


def _shareable_content(path: Path) -> Path | bytes:
    if path.suffix in (".safetensors", ".gguf", ".model") or path.name in _VOCABULARIES:
        return path
    try:
        text = read_limited(path, MAX_JSON_BYTES).decode("utf-8")
        values = parse_json(text) if path.suffix == ".json" else None
    except ValueError as error:
        raise CommandError(f"{path} can't be read: {error}", "Nothing was sent. Restore the file, or delete it.") from None
    cleaned = without_local_paths(values)
    text = text if cleaned == values else json.dumps(cleaned, indent=2, ensure_ascii=False) + "\n"
    require_nothing_private(path.name, text)
    return text.encode()


def push(
    repo: str, files: Sequence[HubFile], *, public: bool = False, update: bool = False,
    progress: Progress = lambda _: None,
) -> str:  # fmt: skip
    """Create the repository, and commit all files together. Return the commit's address.

    Raise CommandError for a user's error, HubError for the network.
    """
    require_repo_id(repo)
    if is_switched_off():
        raise CommandError("the hub is switched off", "Unset HF_HUB_OFFLINE and TRANSFORMERS_OFFLINE.")
    if not get_token():
        raise CommandError("there is no token for the hub", _LOGIN)
    disable_progress_bars()
    api = HfApi(endpoint=os.environ.get("HF_ENDPOINT") or None)
    progress(f"creating {repo}")
    with _hub_errors(repo):
        is_empty = _create_repo(api, repo, public, update)
    operations = [CommitOperationAdd(file.name, file.source) for file in files]
    progress(f"sending {len(files)} files")
    try:
        with _hub_errors(repo):
            commit = api.create_commit(repo, operations, commit_message="Fine-tuned with finetune", revision="main")
    except FinetuneError as error:
        state = f"{repo} is empty: push again to fill it." if is_empty else f"{repo} is unchanged."
        raise type(error)(error.problems, f"{error.fix} {state}".strip()) from error
    return str(commit.commit_url)


def _create_repo(api: Any, repo: str, public: bool, update: bool) -> bool:
    # returns whether the repository is empty
    try:
        api.create_repo(repo, private=not public, repo_type="model", exist_ok=False)
        return True
    except HfHubHTTPError as error:
        if error.response.status_code != 409:  # 409: it exists
            raise
    info = api.repo_info(repo)
    if not info.private and not public:
        raise CommandError(f"{repo} exists and is public", "Choose another name, or add --public.")
    names = {file.rfilename for file in info.siblings or []} - {".gitattributes"}
    if names and not update:
        raise CommandError(f"{repo} already exists and has {len(names)} files", "Choose another name, or add --update.")
    return not names


@contextmanager
def _hub_errors(repo: str) -> Iterator[None]:
    try:
        yield
    except HFValidationError as error:
        raise CommandError(f"{repo[:100]} is not a repository's name: {first_line(error)}") from None
    except FinetuneError:
        raise
    except Exception as error:  # noqa: BLE001 - of any HTTP library that the hub's client uses
        cause = error if isinstance(error, HfHubHTTPError) else error.__cause__ or error
        if not isinstance(cause, HfHubHTTPError):
            reason = f"{type(cause).__name__}: {first_line(cause)}"
            raise HubError(f"the upload to the hub failed: {reason}", "Check the network.") from None
        status = cause.response.status_code
        refusals = {401: "the hub does not know this token", 403: f"this token may not write to {repo}"}
        if status in refusals:
            raise CommandError(f"{refusals[status]} ({status})", _LOGIN) from None
        raise HubError(f"the hub answered {status}: {first_line(cause)}", "Try again later.") from None
