"""Writes the generated blocks of the documentation: settings, exit codes, events, plans, what fits, forecast errors.

    python docs/generate.py                 # make every block and write the pages; minutes
    python docs/generate.py settings cards  # only these blocks
    python docs/generate.py --check         # write nothing; exit 1 and name the blocks that are not up to date
    python docs/generate.py --check --quick # only the blocks that need no forecast: seconds, not minutes

A block is the text between `<!-- made by docs/generate.py: NAME -->` and `<!-- end -->`. Needs no GPU and no network.
Plans of delta nets are those with the extra `hybrid` and Triton, which a torch for the CPU comes without: `pip install triton`.
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import os
import sys
import tempfile
from collections.abc import Callable, Iterator

from blocks.measured import (
    accuracy,
    accuracy_short,
    card_peers,
    gpu,
    gpu_day,
    gpu_day_short,
    gpu_short,
    peers,
    reserved,
    speed,
    stand_in,
    stand_in_edge,
    stand_in_end,
    stand_in_kernels,
    stand_in_models,
    stand_in_short,
)  # fmt: skip
from blocks.page import ROOT, blocks_of, pages, replaced
from blocks.plans import (
    fits,
    fits_offloaded,
    fits_short,
    needs,
    needs_offloaded,
    newest,
    offloading,
    plan_of,
    recipes,
)  # fmt: skip
from blocks.reference import (
    cards,
    chat_formats,
    events,
    exits,
    families,
    model_types,
    other_tools,
    picture_types,
    plan_json,
    preferences,
    settings,
)

#: Columns of the terminal that the plans are printed for.
WIDTH = 118

#: Blocks that take no forecast, blocks that take forecasts, and blocks made from other blocks on the pages.
QUICK: dict[str, Callable[[], str]] = {
    "settings": settings,
    "other-tools": other_tools,
    "exit-codes": exits,
    "cards": cards,
    "chat-formats": chat_formats,
    "events": events,
    "plan-json": plan_json,
    "preferences": preferences,
    "families": families,
    "model-types": model_types,
    "picture-types": picture_types,
    "gpu": gpu,
    "gpu-day": gpu_day,
    "gpu-day-short": gpu_day_short,
    "gpu-day-short-zh": functools.partial(
        gpu_day_short,
        "H200 上，Llama-3.1-8B 的形状（NF4，全部 32 层）：预测 {forecast} 字节，实测 {measured} 字节，误差 {error}。",
    ),
    "peers": peers,
    "card-peers": card_peers,
    "stand-in": stand_in,
    "stand-in-models": stand_in_models,
    "stand-in-edge": stand_in_edge,
    "stand-in-end": stand_in_end,
    "stand-in-kernels": stand_in_kernels,
    "stand-in-short": stand_in_short,
    "stand-in-short-zh": functools.partial(
        stand_in_short,
        "在替身显卡上完整运行 {runs} 次（torch 自己的分配器真实分配，内核不计算）："
        "训练步已分配显存的平均误差 {mean}，最差 {worst}；保留显存 {reserved_mean}，最差 {reserved_worst}。",
    ),
    "gpu-short": gpu_short,
    "gpu-short-zh": functools.partial(
        gpu_short,
        "在 {cards} 上运行 {runs} 次：已分配显存的预测平均误差 {mean}，最差 {worst}。",
        "编写时没有可用的 NVIDIA 显卡：显卡上的任何数字都未测量。",
    ),
}
SLOW: dict[str, Callable[[], str]] = {
    "plan-7b-4090": functools.partial(plan_of, "7b-4090 --why"), "plan-7b-4060": functools.partial(plan_of, "7b-4060"),
    "recipes": recipes, "needs": needs, "accuracy": accuracy,
    "needs-offloaded": needs_offloaded, "offloading": offloading, "newest": newest,
    "reserved": reserved, "speed": speed,
}  # fmt: skip
DERIVED: dict[str, Callable[[], str]] = {
    "fits": fits,
    "fits-offloaded": fits_offloaded,
    "fits-short": fits_short,
    "fits-short-zh": functools.partial(fits_short, ("显卡", ">可用显存", "每行 1,024 个 token", "2,048", "4,096")),
    "accuracy-short": accuracy_short,
    "accuracy-short-zh": functools.partial(
        accuracy_short, "他人在 Tesla T4 上的 {rows} 次实测：平均误差 {mean}，最差 {worst}。"
    ),
}


@contextlib.contextmanager
def clean_state() -> Iterator[None]:
    """Empty caches, so that no forecast, measurement or hub file of this machine changes a page."""
    with tempfile.TemporaryDirectory() as folder:
        os.environ.update(FINETUNE_CACHE=f"{folder}/cache", HF_HOME=f"{folder}/hub", HF_HUB_OFFLINE="1", COLUMNS=str(WIDTH))
        with contextlib.chdir(folder):
            yield


def update(names: list[str], write: bool) -> list[str]:
    """Make the blocks, derived blocks last; returns the blocks that differ from the pages."""
    every = {**QUICK, **SLOW, **DERIVED}
    changed = []
    for name in [name for name in every if not names or name in names]:
        block = every[name]()
        for page in pages():
            text = page.read_text(encoding="utf-8")
            if blocks_of(text).get(name, block) == block:
                continue
            changed.append(f"{name} in {page.relative_to(ROOT)}")
            if write:
                page.write_text(replaced(text, {name: block}), encoding="utf-8")
        print(f"{name}: {'changed' if changed and changed[-1].startswith(f'{name} in') else 'as it was'}", flush=True)  # noqa: T201
    return changed


def main() -> int:
    """Returns 1 when --check found a block that is not up to date."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", choices=[[], *QUICK, *SLOW, *DERIVED], metavar="BLOCK")
    parser.add_argument("--check", action="store_true", help="write nothing")
    parser.add_argument("--quick", action="store_true", help="skip the blocks that take forecasts")
    chosen = parser.parse_args()
    with clean_state():
        changed = update([*QUICK, *DERIVED] if chosen.quick else chosen.names, not chosen.check)
    return 1 if chosen.check and changed else 0


if __name__ == "__main__":
    sys.exit(main())
