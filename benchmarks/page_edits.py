"""Random edits of the Fit page in Chromium, in two tabs: bars, keys, typing, auto, recipe text and fields of all settings.

    python benchmarks/page_edits.py [--edits 200] [--seed 1]

Starts `finetune ui` in an empty folder. In the end each setting must be what was chosen last: in both tabs, in the recipe, and
in plan.json of the run that is then started. While edits come, a plan that is not marked as old must be that of the recipe.
Returns 1 when a choice was lost or an old plan was shown.
"""

from __future__ import annotations

import argparse
import json
import random
import shutil
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from finetune.planner.plan import Verdict, read_plan
from finetune.recipe import load_recipe
from finetune.units import gib
from screenshots import ARGUMENTS, page_started

#: Setting -> identity of its box, and values to type.
BOXES = {
    "max_length": ("length", (128, 256, 320, 512)), "lora_r": ("rank", (4, 8, 16, 24, 48, 64)),
    "effective_batch_size": ("batch", (4, 8, 16)),
}  # fmt: skip
_EDITS = ("bar", "key", "typed", "typed", "auto", "text", "field")
_WAIT_MS, _TAKEN_S = 300_000, 20
#: The rank that the recipe's text has and the one that the plan shown is for; nothing while the plan is marked as old.
_SHOWN = r"""() => {
    const text = (selector) => document.querySelector(selector)?.textContent.trim() ?? "";
    if (text("#fit-asked") !== text("#fit-answered")) return [];
    return [document.querySelector("#fit-asked").textContent, text("#fit-reasons").match(/rank (\d+)/)?.[1]];
}"""

#: Keeps the message of the bar that the pointer has hit: an answer may have replaced or moved the one that was aimed at.
_NOTES_PRESSED = """() => {
    window.pressed = null;
    const note = ({target}) => { window.pressed = target.closest("[role=radio]")?.dataset.act ?? null; };
    document.addEventListener("click", note, true);
}"""


class Editor:
    """Edits at random, and remembers what was chosen last. `draft`: the file of the recipe."""

    def __init__(self, tabs: list[Any], draft: Path, seed: int) -> None:
        self.tabs, self.draft, self.random = tabs, draft, random.Random(seed)
        self.chosen: dict[str, int | None] = {}
        self.problems: list[str] = []
        self.edit_counts: dict[str, int] = {}
        self.log: list[str] = []
        self.used: tuple[str, Any] = ("", None)
        for tab in tabs:
            tab.evaluate(_NOTES_PRESSED)
            tab.click("#fit-advanced > summary")
            tab.wait_for_selector("[data-field=seed]", state="attached")
            tab.evaluate("document.querySelector('[data-field=seed]').closest('details').open = true")

    def edit(self) -> None:
        """One edit in one of the tabs, and a pause."""
        kind, tab, setting = self.random.choice(_EDITS), self.random.choice(self.tabs), self.random.choice(list(BOXES))
        if (kind, tab) != self.used:
            self._wait_until_taken(tab)
        self.used = kind, tab
        edited = getattr(self, f"_{kind}")(tab, setting)
        self.edit_counts[kind] = self.edit_counts.get(kind, 0) + bool(edited)
        self.chosen |= edited or {}
        self.log.append(f"tab {self.tabs.index(tab)}: {kind} {edited}")
        tab.wait_for_timeout(self.random.choice((0, 30, 150, 600)))
        self._require_no_old_plan(tab)

    def _wait_until_taken(self, tab: Any) -> None:
        """Nobody changes to another control or tab in the time that a message takes; in one control nothing is waited for."""
        until = time.monotonic() + _TAKEN_S
        while (unsaved := self._not_taken() or self._not_acknowledged()) and time.monotonic() < until:
            tab.wait_for_timeout(50)
        if unsaved:
            self.problems.append(f"{unsaved} after {self.log[-6:]}")
            for name in unsaved.keys() & self.chosen.keys():
                del self.chosen[name]

    def _not_acknowledged(self) -> dict[str, str]:
        """Tabs with a message on its way, which may be of the value that the recipe has already."""
        unsaved = [tab.evaluate("document.body.hasAttribute('data-unsaved')") for tab in self.tabs]
        return {f"tab {number}": "a message is not acknowledged" for number, waits in enumerate(unsaved) if waits}

    def _not_taken(self) -> dict[str, str]:
        """Settings of which the recipe has not what was chosen last."""
        recipe = load_recipe(str(self.draft))
        drafted = {name: getattr(recipe, name) if name in recipe.model_fields_set else None for name in self.chosen}
        return {
            name: f"chosen last {value}, the recipe has {drafted[name]}"
            for name, value in self.chosen.items()
            if drafted[name] != value
        }

    def _bar(self, tab: Any, setting: str) -> dict[str, int | None] | None:
        """Press with the pointer where a bar is. A person presses what is there at that moment: nothing is waited for."""
        finds = """([bars, share]) => {
            const all = [...document.querySelectorAll(bars)], bar = all[Math.floor(share * all.length)];
            bar?.scrollIntoView({block: "center"});
            const {x, y, width, height} = bar?.getBoundingClientRect() ?? {};
            return bar ? [x + width / 2, y + height / 2] : null;
        }"""
        if (point := tab.evaluate(finds, [_bars_of(setting), self.random.random()])) is None:
            return None
        tab.evaluate("pressed = null")
        tab.mouse.click(*point)
        return _as_choice(tab.evaluate("pressed"))

    def _key(self, tab: Any, setting: str) -> dict[str, int | None] | None:
        key = self.random.choice(("ArrowRight", "ArrowLeft"))
        sends = """([bars, key]) => {
            const bar = document.querySelector(`${bars}[tabindex="0"]`);
            const next = key === "ArrowRight" ? bar?.nextElementSibling : bar?.previousElementSibling;
            if (!next) return null;
            bar.focus();
            bar.dispatchEvent(new KeyboardEvent("keydown", {key, bubbles: true}));
            return next.dataset.act;
        }"""
        return _as_choice(tab.evaluate(sends, [_bars_of(setting), key]))

    def _typed(self, tab: Any, setting: str) -> dict[str, int | None]:
        identity, values = BOXES[setting]
        value = self.random.choice(values)
        box = tab.locator(f"#fit-{identity} input[type=number]")
        box.fill("")
        box.press_sequentially(str(value))
        box.blur()
        return {setting: value}

    def _auto(self, tab: Any, setting: str) -> dict[str, int | None] | None:
        pressed = tab.evaluate(
            "key => { const button = document.querySelector(key); button?.click(); return Boolean(button); }",
            f"[data-key='auto-{setting}']",
        )
        return {setting: None} if pressed else None

    def _text(self, tab: Any, _: str) -> dict[str, int | None] | None:
        """Type into the recipe as it is shown. What was changed elsewhere meanwhile is refused, and the page says so."""
        value = self.random.choice(BOXES["lora_r"][1])
        types = r"""value => {
            const box = document.querySelector("#fit-yaml textarea"), shown = box.value;
            const lines = shown.split("\n").filter((line) => line && !line.startsWith("lora_r:"));
            box.value = [...lines, `lora_r: ${value}`, ""].join("\n");
            box.dispatchEvent(new Event("input", {bubbles: true}));
            return [shown, box.value];
        }"""
        shown, text = tab.evaluate(types, value)
        until = time.monotonic() + _TAKEN_S
        while time.monotonic() < until:
            if self.draft.read_text() == text:
                taken = load_recipe(str(self.draft))
                return {name: getattr(taken, name) for name in BOXES if name in taken.model_fields_set} | {"lora_r": value}
            is_replaced = tab.input_value("#fit-yaml textarea") != text  # the message alone may be that of an earlier text
            if (is_replaced and "has changed" in tab.inner_text("#fit-refused")) or text == shown:
                return None
            tab.wait_for_timeout(50)
        now = tab.input_value("#fit-yaml textarea")
        state = "is still in the box" if now == text else "was replaced in the box"
        self.problems.append(f"a recipe that was typed is neither taken nor refused, and {state}, after {self.log[-6:]}")
        return None

    def _field(self, tab: Any, _: str) -> dict[str, int | None]:
        value = self.random.randrange(1, 1000)
        field = tab.locator("[data-field=seed]")
        field.fill(str(value))
        field.press("Enter")
        return {"seed": value}

    def _require_no_old_plan(self, tab: Any) -> None:
        stamp, rank = tab.evaluate(_SHOWN) or (None, None)
        recipe = load_recipe(str(self.draft))
        stat = self.draft.stat()
        if stamp == f"{stat.st_mtime_ns}-{stat.st_ino}" and recipe.lora_r != "auto" and rank and int(rank) != recipe.lora_r:
            self.problems.append(f"the plan shown is for rank {rank}, the recipe has {recipe.lora_r}")

    def end(self, runs: Path) -> list[str]:
        """Wait until all is planned, compare everything, start the run and compare its plan; returns what differs."""
        for tab in self.tabs:
            tab.evaluate("document.activeElement?.blur()")
            tab.wait_for_timeout(3000)
            tab.wait_for_selector("body:not([data-planning])")
        self._wait_until_taken(self.tabs[0])
        recipe = load_recipe(str(self.draft))
        tab = self.tabs[0]
        before = set(runs.glob("*/plan.json"))
        shown, verdicts = self._boxes(), [tab.inner_text("#fit-verdict") for tab in self.tabs]
        texts = [tab.input_value("#fit-yaml textarea") for tab in self.tabs]
        tab.click("#fit-start")
        tab.wait_for_url("**/run?run=*")
        (started,) = set(runs.glob("*/plan.json")) - before
        plan = read_plan(started)
        settings, forecast = plan.settings, f"Forecast {gib(plan.forecast.peak_bytes if plan.forecast else 0)}"
        planned = {name: getattr(settings, name) for name in BOXES}
        self.problems += [
            f"tab {number} shows {boxes}, planned {planned}" for number, boxes in enumerate(shown) if boxes != planned
        ]
        is_fitting = plan.verdict == Verdict.FITS
        self.problems += [
            f"tab {number} says {verdict!r}, planned {plan.verdict}, {forecast}"
            for number, verdict in enumerate(verdicts) if forecast not in verdict or verdict.startswith("Fits") != is_fitting
        ]  # fmt: skip
        draft = self.draft.read_text()
        self.problems += [f"tab {number} shows another recipe: {text}" for number, text in enumerate(texts) if text != draft]
        if settings.seed != recipe.seed:
            self.problems.append(f"seed: the recipe has {recipe.seed}, the plan {settings.seed}")
        return self.problems

    def _boxes(self) -> list[dict[str, int]]:
        return [
            {name: int(tab.input_value(f"#fit-{identity} input[type=number]")) for name, (identity, _) in BOXES.items()}
            for tab in self.tabs
        ]


def _bars_of(setting: str) -> str:
    return f"#fit-{BOXES[setting][0]}-bars [role=radio]"


def _as_choice(act: str | None) -> dict[str, int | None] | None:
    """Setting and value of a bar's message."""
    message = json.loads(act) if act else None
    return {message["set"]: message["value"]} if message else None


def edit_at_random(tabs: list[Any], runs: Path, edits: int, seed: int) -> tuple[list[str], dict[str, int]]:
    """Make so many edits in these tabs of the Fit page; returns what was lost or stale, and how many edits of each kind.

    Attempts that find nothing to press do not count, and are at most as many again.
    """
    editor = Editor(tabs, runs / ".app/draft/recipe.yaml", seed)
    for _ in range(2 * edits):
        if sum(editor.edit_counts.values()) < edits:
            editor.edit()
    return editor.end(runs), editor.edit_counts


def main() -> int:
    """Edit, and print what was lost."""
    from playwright.sync_api import sync_playwright

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--edits", type=int, default=200)
    parser.add_argument("--seed", type=int, default=1)
    chosen = parser.parse_args()
    with (
        tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder,
        page_started(Path(folder)) as link,
        sync_playwright() as playwright,
    ):
        draft = Path(folder) / "runs/.app/draft/recipe.yaml"
        draft.parent.mkdir(parents=True, exist_ok=True)
        draft.write_text(FIRST)
        browser = playwright.chromium.launch(executable_path=shutil.which("chromium") or None, args=ARGUMENTS)
        context = browser.new_context(viewport={"width": 1440, "height": 900})
        context.set_default_timeout(_WAIT_MS)
        tabs = [context.new_page() for _ in range(2)]
        address, _, query = link.partition("?")
        for tab in tabs:
            tab.goto(f"{address.rstrip('/')}/fit?{query}")
            tab.wait_for_selector("#fit-verdict .ft-verdict")
        problems, counts = edit_at_random(tabs, Path(folder) / "runs", chosen.edits, chosen.seed)
        browser.close()
    print(json.dumps({"edits": counts, "problems": problems}, indent=1))
    return 1 if problems else 0


#: What is edited: the bundled model and data, in steps that take no time. Longer rows are truncated: else a short length that
#: was chosen last rightly keeps the run from starting.
FIRST = """\
model_name_or_path: tiny
dataset: support
gpu: cpu
max_length: 256
excess_length: truncate
lora_r: 16
effective_batch_size: 8
max_steps: 1
save_steps: 0
"""


if __name__ == "__main__":
    sys.exit(main())
