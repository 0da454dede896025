"""Rules for one key of another tool's configuration: carried over, without effect here, or refused."""

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
    """Carried over to `setting`; `convert` may change the value."""

    setting: str
    convert: Callable[[Any], Any] = lambda value: value


@dataclass(frozen=True)
class Ignore:
    """Without effect on what is learnt, or decided by finetune itself."""

    reason: str


@dataclass(frozen=True)
class Refuse:
    """Would change what is learnt. Values in `unless` equal finetune's behaviour; setting `lifted_by` lifts the refusal."""

    reason: str
    unless: tuple[Any, ...] = ()
    lifted_by: str = ""


@dataclass(frozen=True)
class Read:
    """Read together with other keys by the tool's `finish`."""


Rule = Keep | Ignore | Refuse | Read


def each(rule: Rule, keys: str) -> dict[str, Rule]:
    """The same rule for each of `keys`, which white space separates."""
    return dict.fromkeys(keys.split(), rule)


def kept(keys: str, convert: Callable[[Any], Any] | None = None) -> dict[str, Rule]:
    """Keys, separated by white space, that are carried over to the setting of the same name."""
    return {key: Keep(key, convert) if convert else Keep(key) for key in keys.split()}


@dataclass(frozen=True)
class KeyReport:
    """One key of the file and its outcome."""

    key: str
    line: int | None
    outcome: Outcome
    text: str
    note: str = ""  # a difference in a key that is carried over


@dataclass(frozen=True)
class Tool:
    """Another tool's configuration: keys by which it is recognised, separated by white space; all its keys, its defaults (our
    names), and keys that combine."""

    name: str
    markers: str
    keys: dict[str, Rule]
    defaults: dict[str, Any]
    finish: Callable[[ConfigReader], None]
    interpolates: bool = False  # `${output_dir}/logs` has the value of another key, as OmegaConf reads it

    def rule(self, key: str) -> Rule | None:
        """The rule of a key."""
        return self.keys.get(key)


@dataclass
class ConfigReader:
    """Converts one configuration. `values` are its keys without the empty ones; `overrides` the user's, by setting."""

    tool: Tool
    values: dict[str, Any]
    lines: dict[str, int]
    folder: Path
    overrides: dict[str, Any]
    settings: dict[str, Any] = field(default_factory=dict)
    keys_by_setting: dict[str, str] = field(default_factory=dict)
    entries: dict[str, KeyReport] = field(default_factory=dict)
    assumed: dict[str, Any] = field(default_factory=dict)  # the tool's defaults
    notes: list[str] = field(default_factory=list)  # differences that no key of the file has

    def value(self, key: str, default: Any = None) -> Any:
        """The value of a key, or `default` where it is absent or empty."""
        return self.values.get(key, default)

    def is_on(self, key: str) -> bool:
        """Whether a key is set to anything but off."""
        return not is_off(self.value(key))

    def keep(self, key: str, setting: str, value: Any, note: str = "") -> None:
        """Carry `key`, if set, over as `setting`."""
        if key in self.values:
            self.settings[setting] = value
            self.keys_by_setting[setting] = key
            self._report(key, "carried over", f"{setting}: {short_value(value)}", note)

    def share(self, key: str, setting: str, note: str = "") -> None:
        """Report that `key`, if set, is part of `setting`, which another key sets."""
        if key in self.values:
            self._report(key, "carried over", f"part of {setting}", note)

    def ignore(self, key: str, reason: str, note: str = "") -> None:
        """Report why `key`, if set, has no effect here."""
        if key in self.values:
            self._report(key, "no effect", reason, note)

    def ignore_empty(self, key: str) -> None:
        """Report that `key` is in the file without a value."""
        self._report(key, "no effect", "is empty: not set")

    def is_replaced(self, setting: str, keys: Iterable[str]) -> bool:
        """Whether an override sets `setting`; then `keys` have no effect."""
        if setting in self.overrides:
            for key in keys:
                self.ignore(key, f"replaced by the override {setting}")
        return setting in self.overrides

    def refuse(self, key: str, reason: str, lifted_by: str = "") -> None:
        """Refuse `key`, unless the user has set `lifted_by`."""
        if lifted_by and lifted_by in self.overrides:
            self._report(key, "carried over", f"replaced by the override {lifted_by}")
            return
        if lifted_by == "dataset.path":
            self.settings.setdefault(lifted_by, "refused")  # its absence is not a second problem
        problem = f"{reason}; or set {lifted_by}=..." if lifted_by else reason
        self._report(key, "refused", f"{short_value(self.value(key))}: {problem}")

    def assume(self, setting: str, value: Any, note: str = "") -> None:
        """Set `setting` to what the tool does when its key is absent; `note` is a difference that remains."""
        if setting not in self.settings and setting not in self.overrides:
            self.settings[setting] = self.assumed[setting] = value
            if note:
                self.notes.append(note)

    def require_lora(self, key: str, *names: str) -> None:
        """Refuse `key`, which says what is trained, unless it is one of `names`, or not set."""
        if self.value(key, names[0]) in names:
            self.ignore(key, "is what finetune does")
        else:
            self.refuse(key, "finetune trains LoRA adapters")

    def _report(self, key: str, outcome: Outcome, text: str, note: str = "") -> None:
        previous = self.entries.get(key)
        if previous is None or previous.outcome != "refused":
            self.entries[key] = KeyReport(key, self.lines.get(key), outcome, text, note)

    def apply(self, key: str, rule: Rule | None = None) -> None:
        """Apply `rule`, by default the table's, to one key."""
        value = self.values[key]
        match rule or self.tool.rule(key):
            case Keep(setting, convert):
                try:
                    self.keep(key, setting, convert(value))
                except (TypeError, ValueError):
                    self.refuse(key, "is not a value that this key has")
            case Ignore(reason):
                self.ignore(key, reason)
            case Refuse(reason, unless, lifted_by):
                if is_off(value) or value in unless:
                    self.ignore(key, "equals finetune's behaviour")
                else:
                    self.refuse(key, reason, lifted_by)
            case None:
                self.refuse(key, f"is not a key of {self.tool.name} that finetune knows; remove it if it does not matter")


def is_off(value: Any) -> bool:
    """Whether a value means: not used."""
    return value in OFF or value == [] or value == {}


def short_value(value: Any) -> str:
    """A value on one short line."""
    text = str(value).lower() if isinstance(value, bool) else " ".join(str(value).split())
    return text if len(text) <= 60 else text[:57] + "..."


def as_list(value: Any) -> list[str]:
    """A list, or comma-separated text, as a list of texts."""
    if isinstance(value, list):
        return [str(item) for item in value]
    return [item.strip() for item in str(value).split(",") if item.strip()]
