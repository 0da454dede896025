"""`finetune cache`: the size of the tokenised rows on disk, and their deletion."""

from __future__ import annotations

import shutil

from rich.markup import escape

from finetune.cli.app import print_json
from finetune.cli.render import out
from finetune.errors import DiskFull, RecipeError
from finetune.units import format_bytes


def use_cache(verb: str, *, as_json: bool) -> None:
    """Show or clear the tokenised rows. Raises DiskFull when they can't be deleted."""
    if verb not in ("list", "clear"):
        raise RecipeError(f"finetune cache {verb}: unknown", "Use: finetune cache, or finetune cache clear.")
    from finetune.data.token_cache import folder

    root = folder()
    entries = [entry for entry in root.iterdir() if entry.is_dir()] if root.is_dir() else []
    size = sum(file.stat().st_size for file in root.rglob("*") if file.is_file())
    try:
        for entry in entries if verb == "clear" else ():
            shutil.rmtree(entry)
    except OSError as error:
        raise DiskFull(f"{root} can't be deleted: {error.strerror}", "Check its permissions.") from None
    if as_json:
        print_json({"folder": str(root), "files_of_rows": len(entries), "bytes": size, "cleared": verb == "clear"})
        return
    what = f"tokenised rows of {len(entries):,} file(s), {format_bytes(size)}, in {escape(str(root))}"
    out.print(f"cleared: {what}" if verb == "clear" else f"{what}\nTo delete them:  finetune cache clear", soft_wrap=True)
