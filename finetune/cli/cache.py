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

    rows, pictures = cache_folder(), pictures_folder()
    # measured before they are cleared: the report says what was deleted
    row_folders = [path for path in rows.iterdir() if path.is_dir()] if rows.is_dir() else []
    rows_bytes, pictures_bytes = (
        sum(file.stat().st_size for file in folder.rglob("*") if file.is_file()) for folder in (rows, pictures)
    )
    must_clear = verb == "clear"
    if must_clear:
        try:
            for folder in row_folders:
                shutil.rmtree(folder)
            shutil.rmtree(pictures, ignore_errors=not pictures.exists())  # the folder exists only once a dataset had pictures
        except OSError as error:
            raise DiskFull(f"{error.filename or rows} can't be deleted: {error.strerror}", "Check its permissions.") from None
    if as_json:
        print_json({
            "folder": str(rows), "files_of_rows": len(row_folders), "bytes": rows_bytes,
            "pictures_folder": str(pictures), "pictures_bytes": pictures_bytes, "cleared": must_clear,
        })  # fmt: skip
        return
    for line in (
        f"tokenised rows of {len(row_folders):,} file(s), {format_bytes(rows_bytes)}, in {rows}",
        f"sizes and copies of images, {format_bytes(pictures_bytes)}, in {pictures}",
    ):
        out.print(escape(f"cleared: {line}" if must_clear else line), soft_wrap=True)
    if not must_clear:
        out.print("To delete them:  finetune cache clear")
