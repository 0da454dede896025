"""`finetune cache`: the size of tokenised rows, pictures and quantised models on disk, and their deletion."""

from __future__ import annotations

import shutil

from rich.markup import escape

from finetune.cli.output import print_json
from finetune.cli.render import out
from finetune.errors import CommandError, DiskFull
from finetune.units import format_bytes


def use_cache(verb: str, *, as_json: bool) -> None:
    """Show or clear tokenised rows, pictures and quantised models. Raises DiskFull when they can't be deleted."""
    if verb not in ("list", "clear"):
        raise CommandError(f"finetune cache {verb}: unknown", "Use: finetune cache, or finetune cache clear.")
    from finetune.data.pictures.sizes import pictures_folder
    from finetune.data.token_cache import cache_folder
    from finetune.layers import quantised_files

    root, models = cache_folder(), quantised_files.folder()
    entries = [entry for entry in root.iterdir() if entry.is_dir()] if root.is_dir() else []
    size = sum(file.stat().st_size for file in root.rglob("*") if file.is_file())
    pictures = pictures_folder()
    picture_files = [file.stat().st_size for file in pictures.rglob("*") if file.is_file()]
    quantised, quantised_bytes = quantised_files.complete_files(), quantised_files.size_bytes()
    try:
        for entry in entries if verb == "clear" else ():
            shutil.rmtree(entry)
        if verb == "clear":
            quantised_files.clear()
            shutil.rmtree(pictures, ignore_errors=not pictures.exists())
    except OSError as error:
        raise DiskFull(f"{error.filename or root} can't be deleted: {error.strerror}", "Check its permissions.") from None
    if as_json:
        print_json({
            "folder": str(root), "files_of_rows": len(entries), "bytes": size, "models_folder": str(models),
            "pictures_folder": str(pictures), "pictures_bytes": sum(picture_files),
            "quantised_models": len(quantised), "quantised_bytes": quantised_bytes, "cleared": verb == "clear",
        })  # fmt: skip
        return
    for what in (
        f"tokenised rows of {len(entries):,} file(s), {format_bytes(size)}, in {root}",
        f"sizes and copies of pictures, {format_bytes(sum(picture_files))}, in {pictures}",
        f"{len(quantised):,} quantised model(s), {format_bytes(quantised_bytes)}, in {models}",
    ):
        out.print(escape(f"cleared: {what}" if verb == "clear" else what), soft_wrap=True)
    if verb != "clear":
        out.print("To delete them:  finetune cache clear")
