"""Host memory, disk, the page's port, and whether this system lets a full card spill into host memory."""

from __future__ import annotations

import platform
import shutil
import socket
import sys
from pathlib import Path

from finetune.card.find import find_card
from finetune.doctor.finding import Finding
from finetune.units import GIB, format_bytes

#: Below the first a warning, below the second not even the libraries and the bundled model fit well.
USUAL_MEMORY_BYTES = 8 * GIB
LEAST_MEMORY_BYTES = 2 * GIB
#: The weights of a 7B model are 15 GB in 16 bit; checkpoints and the adapter come on top.
USUAL_DISK_BYTES = 20 * GIB
LEAST_DISK_BYTES = GIB
#: Where `finetune ui` listens.
PORT = 7860


def check_memory(usual_bytes: int = USUAL_MEMORY_BYTES, least_bytes: int = LEAST_MEMORY_BYTES) -> Finding:
    """Host memory that is available, within the container's limit if there is one."""
    host = find_card("cpu")
    what = f"{format_bytes(host.free_bytes)} of {format_bytes(host.total_bytes)} available"
    facts = {"free_bytes": host.free_bytes, "total_bytes": host.total_bytes}
    if host.free_bytes >= usual_bytes:
        return Finding("host memory", "ok", what, facts=facts)
    fix = "Close other programs. WSL gets half of the host's: raise memory= in .wslconfig. In a container raise --memory."
    if host.free_bytes >= least_bytes:
        return Finding("host memory", "warn", f"{what}; loading a large model may be slow, or be killed", fix, facts)
    return Finding("host memory", "fail", f"{what}; at least {format_bytes(least_bytes)} are needed", fix, facts)


def check_disk(
    places: dict[str, Path] | None = None, usual_bytes: int = USUAL_DISK_BYTES, least_bytes: int = LEAST_DISK_BYTES
) -> list[Finding]:
    """Room and permission where runs are written (here) and where the hub's files are kept."""
    findings = []
    for use, place in (places or {"runs": Path.cwd(), "hub cache": _hub_cache()}).items():
        existing = next(parent for parent in (place.absolute(), *place.absolute().parents) if parent.exists())
        free = shutil.disk_usage(existing).free
        what = f"{use}: {format_bytes(free)} free at {existing}"
        facts = {"use": use, "path": str(existing), "free_bytes": free}
        if not _is_writable(existing):
            fix = f"Make it yours (sudo chown -R $USER {existing}), or choose another place."
            findings.append(Finding("disk", "fail", f"{use}: {existing} can't be written to", fix, facts))
        elif free < least_bytes:
            fix = "Free some space: old checkpoints in runs/, models you don't need with `hf cache ls` and `hf cache rm`."
            findings.append(Finding("disk", "fail", what, fix, facts))
        elif free < usual_bytes:
            fix = "The weights of a 7B model alone are 15 GB: free some space, or set output_dir and HF_HOME to another disk."
            findings.append(Finding("disk", "warn", what, fix, facts))
        else:
            findings.append(Finding("disk", "ok", what, facts=facts))
    return findings


def check_port(port: int = PORT) -> Finding:
    """Can the page listen on its usual port?"""
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("127.0.0.1", port))
        except OSError as error:
            what = f"{port} is taken or not allowed ({(error.strerror or str(error)).lower()})"
            return Finding("port", "warn", what, f"Perhaps the page runs already. Else: finetune ui --port {port + 1}")
    return Finding("port", "ok", f"{port} is free for finetune ui")


def check_spill(system: str | None = None, release: str | None = None) -> Finding:
    """On Windows, and so under WSL, the driver moves what does not fit the card into host memory instead of refusing it.

    Nothing then fails and everything is 10 to 50 times slower. The setting can't be read from here. Arguments: as `platform`'s.
    """
    system, release = system or platform.system(), release or platform.release()
    wsl = "microsoft" in release.lower()
    if system != "Windows" and not wsl:
        return Finding("spill", "ok", f"{system} refuses what does not fit the card; it does not spill")
    where = "WSL: the Windows driver" if wsl else "Windows: the driver"
    fix = (
        "NVIDIA Control Panel > Manage 3D settings > CUDA - Sysmem Fallback Policy: Prefer No Sysmem Fallback"
        f"{' (on Windows, for python)' if wsl else f', for {Path(sys.executable).name}'}."
    )
    return Finding("spill", "warn", f"{where} may spill a full card into host memory, 10 to 50 times slower", fix)


def _hub_cache() -> Path:
    from huggingface_hub import constants

    return Path(constants.HF_HUB_CACHE)


def _is_writable(folder: Path) -> bool:
    """Really tried: permission bits say nothing of read-only mounts and network shares."""
    import tempfile

    try:
        with tempfile.TemporaryFile(dir=folder):
            return True
    except OSError:
        return False
