"""`finetune cache`: what is in the cache folder, and its deletion."""

from __future__ import annotations

import shutil
from pathlib import Path

from rich.markup import escape

from finetune.cli.app import print_json
from finetune.cli.render import out, table
from finetune.errors import DiskFull, RecipeError
from finetune.files import cache_dir
from finetune.units import format_bytes

#: Folders of the cache that can be made again -> what they have.
_KINDS = {"tokens": "tokenised rows", "forecasts": "forecasts of memory"}


def use_cache(verb: str, *, as_json: bool) -> None:
    """List or clear the cache. Raises DiskFull when it can't be deleted."""
    if verb not in ("list", "clear"):
        raise RecipeError(f"finetune cache {verb}: unknown", "Use: finetune cache, or finetune cache clear.")
    root = cache_dir()
    sizes = {name: _size(root / name) for name in _KINDS}
    if verb == "clear":
        for name in _KINDS:
            _delete(root / name)
    if as_json:
        print_json({"folder": str(root), "cleared": verb == "clear", "bytes": sizes})
        return
    if verb == "clear":
        out.print(f"cleared: {format_bytes(sum(sizes.values()))} in {escape(str(root))}", soft_wrap=True)
        return
    shown = table("what", ">size", title=escape(str(root)))
    for name, what in _KINDS.items():
        shown.add_row(what, format_bytes(sizes[name]))
    out.print(shown)
    out.print("To delete them:  finetune cache clear")


def _size(folder: Path) -> int:
    return sum(file.stat().st_size for file in folder.rglob("*") if file.is_file())


def _delete(folder: Path) -> None:
    try:
        if folder.exists():
            shutil.rmtree(folder)
    except OSError as error:
        raise DiskFull(f"{folder} can't be deleted: {error.strerror}", "Check its permissions.") from None
