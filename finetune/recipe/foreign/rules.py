"""What becomes of one key of another tool's configuration: carried over, without effect here, or refused."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

#: Values of a switch that is off.
OFF: tuple[Any, ...] = (None, False, 0, "", "none", "None", "no", "false")
Outcome = Literal["carried over", "no effect", "refused"]


@dataclass(frozen=True)
class Keep:
    """Carried over to the setting `ours`; `convert` may change the value, `note` says what is not quite the same."""

    ours: str
    convert: Callable[[Any], Any] = lambda value: value
    note: str = ""


@dataclass(frozen=True)
class Ignore:
    """Without effect on what is learnt, or done by finetune in its own way."""

    why: str


@dataclass(frozen=True)
class Refuse:
    """Would change what is learnt. Values in `unless` are what happens here anyway; setting `lifted_by` lifts the refusal."""

    why: str
    unless: tuple[Any, ...] = ()
    lifted_by: str = ""


@dataclass(frozen=True)
class Read:
    """Read together with other keys by the tool's `finish`."""


Rule = Keep | Ignore | Refuse | Read


@dataclass(frozen=True)
class Entry:
    """One key of the file, and what became of it."""

    key: str
    line: int | None
    outcome: Outcome
    text: str
    note: str = ""  # what differs although it was carried over


@dataclass(frozen=True)
class Tool:
    """Another tool's configuration: how it is recognised, its keys, its defaults (our names), and what keys mean together."""

    name: str
    markers: frozenset[str]
    keys: dict[str, Rule]
    defaults: dict[str, Any]
    finish: Callable[[Reading], None]
    nested: bool = False  # keys are dotted: `lora.lora_r`

    def rule(self, key: str) -> Rule | None:
        """The rule of a key; a rule of `section.*` is for all keys of that section."""
        parts = key.split(".")
        wider = (".".join(parts[:n]) + ".*" for n in range(len(parts), 0, -1))
        return self.keys.get(key) or next((self.keys[name] for name in wider if name in self.keys), None)


@dataclass
class Reading:
    """A configuration while it is read. `values` are its keys without the empty ones; `given` the user's overrides."""

    tool: Tool
    values: dict[str, Any]
    lines: dict[str, int]
    folder: Path
    given: dict[str, Any]
    settings: dict[str, Any] = field(default_factory=dict)
    origin: dict[str, str] = field(default_factory=dict)  # our setting -> their key
    entries: dict[str, Entry] = field(default_factory=dict)
    assumed: dict[str, Any] = field(default_factory=dict)  # the tool's defaults

    def value(self, key: str, default: Any = None) -> Any:
        """The value of a key, or `default` where it is absent or empty."""
        return self.values.get(key, default)

    def is_on(self, key: str) -> bool:
        """Whether a key is set to anything but off."""
        return not is_off(self.value(key))

    def keep(self, key: str, ours: str, value: Any, note: str = "") -> None:
        """Carry `key` over as `ours`."""
        self.settings[ours] = value
        self.origin[ours] = key
        self._enter(key, "carried over", f"{ours}: {shown(value)}", note)

    def share(self, key: str, ours: str, note: str = "") -> None:
        """Say that `key` is part of what another key set, where it is set."""
        if key in self.values:
            self._enter(key, "carried over", f"part of {ours}", note)

    def ignore(self, key: str, why: str, note: str = "") -> None:
        """Say why `key` has no effect here, where it is set."""
        if key in self.values:
            self._enter(key, "no effect", why, note)

    def ignore_empty(self, key: str) -> None:
        """Say that `key` is in the file without a value."""
        self._enter(key, "no effect", "is empty: not set")

    def is_replaced(self, ours: str, keys: Iterable[str]) -> bool:
        """Whether an override sets `ours`; then `keys` have no effect."""
        if ours in self.given:
            for key in keys:
                self.ignore(key, f"replaced by the override {ours}")
        return ours in self.given

    def refuse(self, key: str, why: str, lifted_by: str = "") -> None:
        """Refuse `key`, unless the user has set `lifted_by`."""
        if lifted_by and lifted_by in self.given:
            self._enter(key, "carried over", f"replaced by the override {lifted_by}")
            return
        if lifted_by == "dataset.path":
            self.settings.setdefault(lifted_by, "refused")  # its absence is not a second problem
        more = f"; or set {lifted_by}=..." if lifted_by else ""
        self._enter(key, "refused", f"{shown(self.value(key))}: {why}{more}")

    def assume(self, ours: str, value: Any) -> None:
        """Set `ours` to what the tool does when its key is absent."""
        if ours not in self.settings and ours not in self.given:
            self.settings[ours] = self.assumed[ours] = value

    def line_of(self, key: str) -> int | None:
        """The line of a key in the file, from 1."""
        return self.lines.get(key)

    def _enter(self, key: str, outcome: Outcome, text: str, note: str = "") -> None:
        known = self.entries.get(key)
        if known is None or known.outcome != "refused":
            self.entries[key] = Entry(key, self.line_of(key), outcome, text, note)

    def apply(self, key: str) -> None:
        """Apply the table's rule to one key."""
        value = self.values[key]
        match self.tool.rule(key):
            case Keep(ours, convert, note):
                try:
                    self.keep(key, ours, convert(value), note)
                except (TypeError, ValueError):
                    self.refuse(key, "is not a value that this key has")
            case Ignore(why):
                self.ignore(key, why)
            case Refuse(why, unless, lifted_by):
                if is_off(value) or value in unless:
                    self.ignore(key, "is what happens here anyway")
                else:
                    self.refuse(key, why, lifted_by)
            case None:
                self.refuse(key, f"is not a key of {self.tool.name} that finetune knows; remove it if it does not matter")


def is_off(value: Any) -> bool:
    """Whether a value means: not used."""
    return value in OFF or value == [] or value == {}


def shown(value: Any) -> str:
    """A value on one short line."""
    text = {True: "true", False: "false"}.get(value, str(value)) if isinstance(value, bool) else str(value)
    return text if len(text) <= 60 else text[:57] + "..."


def listed(value: Any) -> list[str]:
    """A list, or text with commas, as a list of words."""
    if isinstance(value, list):
        return [str(part) for part in value]
    return [part.strip() for part in str(value).split(",") if part.strip()]
