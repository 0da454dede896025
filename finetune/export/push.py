"""Send a run's adapter, merged model or GGUF files to a hub repository."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from huggingface_hub import CommitOperationAdd, HfApi, get_token
from huggingface_hub.errors import HfHubHTTPError, HFValidationError
from huggingface_hub.utils import disable_progress_bars

from finetune.data.report import first_line
from finetune.errors import CommandError, FinetuneError, HubError
from finetune.export.model_card import CARD, model_card, require_nothing_private, without_local_paths
from finetune.export.targets import TARGETS
from finetune.files import MAX_JSON_BYTES, parse_json, read_limited
from finetune.hub import is_switched_off, require_repo_id
from finetune.run.directory import RunDirectory
from finetune.run.fingerprint import require_own_adapter
from finetune.units import Progress

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
        paths = _model_files(run, kind)
    files = [HubFile(path.name, _shareable_content(path)) for path in paths]
    return sorted([*files, HubFile(CARD, model_card(run, kind).encode())], key=lambda file: file.name)


def _model_files(run: RunDirectory, kind: str) -> list[Path]:
    folder = run.path / TARGETS[kind].folder
    if kind == "adapter":
        require_own_adapter(run, folder, base=False)
    elif not (folder / "config.json").is_file():
        raise CommandError(f"{run.path} has no merged model", f"Merge it first: finetune merge {run.path}")
    files = [path for path in folder.iterdir() if path.is_file() and path.suffix in _MODEL_SUFFIXES]
    return [path for path in files if path.name not in _LOCAL_FILES]


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
