"""`finetune cache`."""

from __future__ import annotations

import shutil

from rich.markup import escape

from finetune.cli.output import print_json
from finetune.cli.render import out
from finetune.errors import CommandError, DiskFull
from finetune.units import format_bytes


def use_cache(verb: str, *, as_json: bool) -> None:
    """Show or clear the caches. Raises DiskFull."""
    if verb not in ("list", "clear"):
        raise CommandError(f"finetune cache {verb}: unknown", "Use: finetune cache, or finetune cache clear.")
    from finetune.data.pictures.source import pictures_folder
    from finetune.data.token_cache import cache_folder

    caches = {"tokenised rows": cache_folder(), "images": pictures_folder()}
    must_clear, content = verb == "clear", {}
    for name, folder in caches.items():
        # measured before it is cleared: the report says what was deleted
        size_bytes = sum(file.stat().st_size for file in folder.rglob("*") if file.is_file())
        content[name] = {"folder": str(folder), "bytes": size_bytes}
        try:
            if must_clear and folder.exists():
                shutil.rmtree(folder)
        except OSError as error:
            raise DiskFull(f"{error.filename or folder} can't be deleted: {error.strerror}", "Check its permissions.") from None
        if not as_json:
            line = f"{name}, {format_bytes(size_bytes)}, in {folder}"
            out.print(escape(f"cleared: {line}" if must_clear else line), soft_wrap=True)
    if as_json:
        print_json({"caches": content, "cleared": must_clear})
    elif not must_clear:
        out.print("To delete them:  finetune cache clear")
