"""Strict YAML 1.2 with line numbers, and YAML 1.1 for files of other tools."""

# YAML 1.1 reads `no` as false, 010 as 8, 12:30 as 750 and 1e-4 as text. Other tools read their files so, with PyYAML. Duplicate
# keys and alias bombs are refused in all files.

from __future__ import annotations

import re
from typing import Any

import yaml

from finetune.errors import RecipeError

#: Values by key, as a file has them, nested.
Values = dict[str, Any]
MAX_CHARACTERS, MAX_DEPTH, MAX_NODES = 200_000, 20, 10_000
_NO_TEXT = re.compile("[\x00\ud800-\udfff]")
_TAG = "tag:yaml.org,2002:"
_FLOAT = re.compile(r"[-+]?(?:\.[0-9]+|(?:0|[1-9][0-9]*)(?:\.[0-9]*)?)(?:[eE][-+]?[0-9]+)?$")


class _Resolver(yaml.resolver.BaseResolver):
    """YAML 1.2's types of plain scalars, with decimal and finite numbers."""


_Resolver.add_implicit_resolver(f"{_TAG}bool", re.compile("(?:true|True|TRUE|false|False|FALSE)$"), list("tTfF"))
_Resolver.add_implicit_resolver(f"{_TAG}null", re.compile("(?:~|null|Null|NULL|)$"), ["~", "n", "N", ""])
# a signed 64-bit integer has up to 19 digits
_Resolver.add_implicit_resolver(f"{_TAG}int", re.compile("[-+]?(?:0|[1-9][0-9]{0,18})$"), list("-+0123456789"))
_Resolver.add_implicit_resolver(f"{_TAG}float", _FLOAT, list("-+.0123456789"))


class _Loader(yaml.SafeLoader):
    """Loader of recipes."""

    yaml_implicit_resolvers = _Resolver.yaml_implicit_resolvers

    def compose_node(self, parent: Any, index: Any) -> Any:
        if self.check_event(yaml.AliasEvent):
            problem = "aliases are not used in recipes; write the value out"
            raise yaml.composer.ComposerError(None, None, problem, self.peek_event().start_mark)
        return super().compose_node(parent, index)


class OtherToolsLoader(yaml.SafeLoader):
    """PyYAML's YAML 1.1, except that 1e-4 is a number, as the tools convert that text, and dates stay text."""

    yaml_implicit_resolvers = {
        letter: [(tag, pattern) for tag, pattern in resolvers if tag != f"{_TAG}timestamp"]
        for letter, resolvers in yaml.SafeLoader.yaml_implicit_resolvers.items()
    }


OtherToolsLoader.add_implicit_resolver(f"{_TAG}float", _FLOAT, list("-+.0123456789"))


class _Dumper(yaml.SafeDumper):
    """Dumper that quotes text which `parse` would misread."""

    yaml_implicit_resolvers = _Resolver.yaml_implicit_resolvers


_Dumper.add_representer(
    str, lambda dumper, text: dumper.represent_scalar(f"{_TAG}str", text, style=None if text.isprintable() else '"')
)


def parse(text: str, name: str, loader: type[yaml.SafeLoader] = _Loader) -> Document:
    """Parse a mapping. Raises RecipeError if it is not YAML."""
    if len(text) > MAX_CHARACTERS:
        raise RecipeError(f"{name}: {len(text):,} characters are too many for a recipe; the limit is {MAX_CHARACTERS:,}")
    try:
        reader = loader(text)
        root = reader.get_single_node()
    except yaml.YAMLError as error:
        position = getattr(error, "problem_mark", None)
        location = f"{name}:{position.line + 1}" if position else name
        raise RecipeError(f"{location}: not valid YAML: {getattr(error, 'problem', None) or error}") from None
    except RecursionError:
        raise RecipeError(f"{name}: nested too deep") from None
    if root is None:
        raise RecipeError(f"{name}: the file is empty", "Start from `finetune recipes show tiny-cpu`.")
    if not isinstance(root, yaml.MappingNode):
        fix = "Start from `finetune recipes show tiny-cpu`, or convert another tool's YAML file: finetune convert FILE"
        if isinstance(root, yaml.SequenceNode):
            fix = f"If it is data: finetune data tiny-cpu dataset.path={name}"
        raise RecipeError(f"{name}: not a recipe; it must be a mapping of `key: value` lines", fix)
    return Document(root, name, reader)


def parse_value(text: str) -> Any:
    """Parse the value of an override; other text than YAML is literal."""
    if not text.strip():
        return None
    if _NO_TEXT.search(text):
        raise RecipeError(f"{ascii(text)} has a zero byte or bytes that are not UTF-8")
    try:
        document = parse(f"value: {text}", "override")
    except RecipeError:
        return text
    return text if document.problems else document.values["value"]


def dump(values: Values) -> str:
    """Return YAML that `parse` reads back."""
    return yaml.dump(values, Dumper=_Dumper, sort_keys=False, allow_unicode=True, width=120)


class Document:
    """Parsed values, with their lines."""

    def __init__(self, root: yaml.MappingNode, name: str, reader: yaml.SafeLoader) -> None:
        #: Line, from 1, of each dotted path.
        self.lines: dict[str, int] = {}
        self.problems: list[str] = []  # duplicate keys, and keys that are no words; syntax errors are raised
        self._name, self._reader = name, reader
        self._nodes = 0  # an alias is counted each time it is used
        self.values = self._mapping(root, "")

    def _value(self, node: yaml.Node, path: str) -> Any:
        self._nodes += 1
        location = f"{self._name}:{node.start_mark.line + 1}"
        if self._nodes > MAX_NODES or path.count(".") > MAX_DEPTH:
            raise RecipeError(f"{location}: nested too deep or too long; a recipe is one flat list")
        if isinstance(node, yaml.MappingNode):
            return self._mapping(node, path)
        if isinstance(node, yaml.SequenceNode):
            return [self._value(item, f"{path}.{index}") for index, item in enumerate(node.value)]
        if _NO_TEXT.search(node.value):
            raise RecipeError(f"{location}: zero bytes and lone surrogates (\\u0000, \\ud800 to \\udfff) are not allowed")
        try:
            value = self._reader.construct_object(node)
        except (yaml.YAMLError, ValueError) as error:
            raise RecipeError(f"{location}: not valid YAML: {getattr(error, 'problem', None) or error}") from None
        if isinstance(value, str | int | float | None):
            return value
        raise RecipeError(f"{location}: tags ({node.tag}) are not used in recipes")

    def _mapping(self, node: yaml.MappingNode, path: str) -> Values:
        values: Values = {}
        for key_node, value_node in node.value:
            line = key_node.start_mark.line + 1
            if not isinstance(key_node, yaml.ScalarNode) or _NO_TEXT.search(key_node.value):
                self.problems.append(f"{self._name}:{line}: a key must be a plain word")
                continue
            key = key_node.value
            key_path = f"{path}.{key}" if path else key
            if key in values:
                self.problems.append(
                    f"{self._name}:{line}: '{key_path}' is set twice (first on line {self.lines[key_path]}); keep one"
                )
                continue
            self.lines[key_path] = line
            values[key] = self._value(value_node, key_path)
        # `<<: *defaults` adds keys that the mapping doesn't set
        defaults = values.pop("<<", {}) if isinstance(self._reader, OtherToolsLoader) else {}
        for mapping in reversed(defaults) if isinstance(defaults, list) else [defaults]:
            values = {**mapping, **values} if isinstance(mapping, dict) else values
        return values
