"""`finetune cache`: size and deletion of cached data."""

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
    from finetune.layers import quantised_files

    rows, pictures, models = cache_folder(), pictures_folder(), quantised_files.folder()
    # measured before they are cleared: the report says what was deleted
    entries = [entry for entry in rows.iterdir() if entry.is_dir()] if rows.is_dir() else []
    rows_bytes, pictures_bytes = (
        sum(file.stat().st_size for file in folder.rglob("*") if file.is_file()) for folder in (rows, pictures)
    )
    quantised, quantised_bytes = len(quantised_files.complete_models()), quantised_files.size_bytes()
    clear = verb == "clear"
    if clear:
        try:
            for entry in entries:
                shutil.rmtree(entry)
            quantised_files.clear()
            # the folder exists only once a dataset had pictures
            shutil.rmtree(pictures, ignore_errors=not pictures.exists())
        except OSError as error:
            raise DiskFull(f"{error.filename or rows} can't be deleted: {error.strerror}", "Check its permissions.") from None
    if as_json:
        print_json({
            "folder": str(rows), "files_of_rows": len(entries), "bytes": rows_bytes, "models_folder": str(models),
            "pictures_folder": str(pictures), "pictures_bytes": pictures_bytes,
            "quantised_models": quantised, "quantised_bytes": quantised_bytes, "cleared": clear,
        })  # fmt: skip
        return
    for what in (
        f"tokenised rows of {len(entries):,} file(s), {format_bytes(rows_bytes)}, in {rows}",
        f"sizes and copies of images, {format_bytes(pictures_bytes)}, in {pictures}",
        f"{quantised:,} quantised model(s), {format_bytes(quantised_bytes)}, in {models}",
    ):
        out.print(escape(f"cleared: {what}" if clear else what), soft_wrap=True)
    if not clear:
        out.print("To delete them:  finetune cache clear")
