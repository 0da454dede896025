"""The texts of errors in the source, as templates with named values: those that a page can show.

`PYTHONPATH=. python -m tests.app.error_templates` writes an entry of `app/languages/zh.po` for each text that has none.
"""

import ast
import re
import sys
from collections import defaultdict
from functools import cache
from pathlib import Path

from pydantic_core import PydanticKnownError

import finetune
from app import language
from app.language import catalogue
from finetune import errors

ROOT, APP = Path(finetune.__file__).parent, Path(language.__file__).parent
#: Folders of modules whose errors no page shows.
NOT_ON_A_PAGE = {
    "api": "Python's interface, called by the user's own code",
    "cli": "options of commands, for a terminal",
    "serve": "answers to clients of OpenAI's interface",
    "jobs.py": "job files are made in a terminal",
    "sweep": "sweeps are started in a terminal, a page only reads them",
    "compat": "names that a library lacks, for this project's developers",
    "views": "makes HTML of errors and raises none",
    "web": "of the server that has no page yet, and of addresses",
}
#: Errors with numbers instead of a text, and those that are always caught.
NOT_SHOWN = {"RequestError", "OutOfMemory", "_TaskError"}
#: Functions whose texts become problems or fixes in another module.
OF_ERRORS = re.compile(r"problem|_fix\b|hint|advice|why_not|^refusal_lines$|^_explain$|^why_")
#: What makes a finding, a suggestion, or the reason why a key can't be converted -> how many arguments come before its text.
FINDINGS = {"Finding": 1, "finding": 1, "_finding": 2, "offer": 1, "refuse": 1, "Refuse": 0, "_report": 2}
#: Tables of them that other modules read.
TABLES = {"TOKENISED", "MEANINGS", "FIXES", "_DAMAGE", "_NOTES", "WHEEL_FIX", "COMPILER_FIX"}
#: Lists of them.
COLLECTED = re.compile(r"(problem|fix)(s|es)?$")
#: Pydantic's own errors of settings, with what its messages must be given.
PYDANTIC = {
    "greater_than": {"gt": 0}, "greater_than_equal": {"ge": 0}, "less_than": {"lt": 0}, "less_than_equal": {"le": 0},
    "int_type": {}, "float_type": {}, "finite_number": {}, "bool_type": {}, "string_type": {}, "list_type": {}, "dict_type": {},
    "literal_error": {"expected": ""}, "model_type": {"class_name": ""}, "string_too_short": {"min_length": 1},
}  # fmt: skip
#: The system's own, inside of others.
OF_THE_SYSTEM = (
    "[Errno {number}] {error}: {path}", "[Errno {number}] {error}", "No space left on device", "Permission denied",
    "No such file or directory", "Read-only file system", "Is a directory", "Not a directory", "File exists",
    "File name too long", "Disk quota exceeded", "Input/output error", "Connection refused",
)  # fmt: skip
#: What is no word: values, settings, names in quotes.
_NO_WORDS = re.compile(r"\{\w+\}|\S*[a-z][_.]\w\S*|[`'].*?[`']")
_PROSE = re.compile(r"[A-Za-z]{2,}.*[ ,.;:].*[A-Za-z]|[a-z]+ |(^|\S) [a-z]{2,}")


def shape(template):
    """The template without the names of its values: renaming a variable changes no text."""
    return re.sub(r"\{\w+\}", "{}", template)


@cache
def error_templates():
    """Template -> the modules that have it."""
    modules = {
        path: ast.parse(path.read_text(encoding="utf-8"))
        for root in (ROOT, APP)
        for path in sorted(root.rglob("*.py"))
        if path.relative_to(root).parts[0] not in NOT_ON_A_PAGE
    }
    names, templates = _error_names(modules.values()), defaultdict(set)
    templates.update({text: {"system"} for text in OF_THE_SYSTEM})
    for kind, values in PYDANTIC.items():
        message = PydanticKnownError(kind, values or None).message_template
        templates[message.replace("Input should", "it should")].add("pydantic")
    for path, tree in modules.items():
        texts = _Texts(tree)
        texts.add([ast.Name(name) for name in TABLES], None)
        texts.add_said_of_names("_OTHERS")
        for node in ast.walk(tree):
            if isinstance(node, ast.FunctionDef) and (OF_ERRORS.search(node.name) or _is_rule(node, path)):
                texts.add_results(node)
            if isinstance(node, ast.ClassDef) and node.name in names:
                supers = [call for call in ast.walk(node) if isinstance(call, ast.Call) and _name(call.func) == "__init__"]
                for call in supers:
                    texts.add(call.args, texts.scopes.get(call))
            if isinstance(node, ast.ClassDef):  # of a vendor
                attributes = [pair for statement in node.body for pair in _assigned(statement)]
                texts.add([value for target, value in attributes if OF_ERRORS.search(_name(target))], None)
            if isinstance(node, ast.Call):
                is_collected = _name(node.func) in ("append", "extend") and COLLECTED.search(_name(node.func.value))
                is_setting = _name(node.func) == "ValueError" and (path.parent.name == "settings" or path.name == "units.py")
                if _name(node.func) in FINDINGS:
                    texts.add(node.args[FINDINGS[_name(node.func)] :], texts.scopes.get(node))
                if _name(node.func) in names or is_collected or is_setting:
                    texts.add([*node.args, *(keyword.value for keyword in node.keywords)], texts.scopes.get(node))
        for template in texts.templates:
            if path.name == "column_semantics.py":  # which writes its values' names in capitals
                parts = re.split(r"\b(NAME|FILE|SPLIT)\b", template)
                template = _template([ast.Name(part) if number % 2 else part for number, part in enumerate(parts)])
            templates[template].add(path.name)
    return templates


def _error_names(trees):
    """FinetuneError and what derives from it, the errors of rows, and a draft that is wrong, by name."""
    names = {
        "BadRow",
        "BadPicture",
        "Refused",
        "Edited",
        *(name for name, value in vars(errors).items() if isinstance(value, type)),
    }
    for tree in trees:
        for node in ast.walk(tree):
            if isinstance(node, ast.ClassDef) and names.intersection(map(_name, node.bases)):
                names.add(node.name)
    return names - NOT_SHOWN


def _is_rule(function, path):
    """Whether it yields what can't go together in a recipe, or what to do about columns, or is the text of a refused row."""
    returned = ast.unparse(function.returns) if function.returns else ""
    is_text = path.parent.name == "data" and function.name == "__str__"
    return returned == "Iterator[Suggestion]" or is_text or (path.parent.name == "settings" and returned == "Iterator[str]")


def _name(node):
    return getattr(node, "attr", getattr(node, "id", ""))


class _Texts:
    """The texts that expressions of one module can be; their variables and functions are followed inside it."""

    def __init__(self, tree):
        self.templates, self._visited = set(), set()
        self._constants = {_name(target): value for node in tree.body for target, value in _assigned(node)}
        self._functions = [node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)]
        self.scopes = {node: function for function in self._functions for node in ast.walk(function)}

    def add_results(self, function):
        """The texts that a function returns or yields."""
        results = [node for node in ast.walk(function) if isinstance(node, ast.Return | ast.Yield | ast.YieldFrom)]
        self.add([node.value for node in results], function)

    def add_said_of_names(self, table):
        """The texts in a table of names: each row begins with the pattern of a name."""
        for row in getattr(self._constants.get(table), "elts", []):
            self.add(row.elts[1:], None)

    def add(self, nodes, scope):
        """The texts that expressions in the function `scope` can be."""
        for node in nodes:
            if node is None or (node, scope) in self._visited:
                continue
            self._visited.add((node, scope))
            if (parts := self._parts(node)) is None:
                self.add(self._sources(node, scope), scope)
                continue
            self._keep(_template(parts))
            self.add([part for part in parts if isinstance(part, ast.Name | ast.IfExp | ast.Call | ast.BoolOp)], scope)

    def _parts(self, node):
        """A text's strings, and the expressions of its values; None for an expression that isn't written as a text."""
        if isinstance(node, ast.Name) and isinstance(constant := self._constants.get(node.id), ast.Constant):
            node = constant
        if isinstance(node, ast.Constant):
            return [node.value] if isinstance(node.value, str) else None
        if isinstance(node, ast.JoinedStr):
            values = [value.value if isinstance(value, ast.FormattedValue) else value for value in node.values]
            return [part for value in values for part in self._parts(value) or [value]]
        if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Add):
            left, right = self._parts(node.left), self._parts(node.right)
            return [*(left or [node.left]), *(right or [node.right])] if left or right else None
        return None

    def _sources(self, node, scope):
        """The expressions that give an expression its texts."""
        if isinstance(node, ast.Name):
            pairs = [pair for inner in ast.walk(scope) for pair in _assigned(inner)] if scope else []
            return [*(value for target, value in pairs if _name(target) == node.id), self._constants.get(node.id)]
        if isinstance(node, ast.Call):
            called = _name(node.func)
            for function in self._functions:
                if function.name == called:
                    self.add_results(function)
            is_table = any(_name(argument) in self._constants for argument in node.args)
            owner = [node.func.value] if called in ("replace", "strip", "pop", "get", "format") else []
            owner += [keyword.value for keyword in node.keywords] if called == "format" else []
            is_passed = called in ("str", "list", "sorted", "next", "pop", "get", "fromkeys") or (
                called == "join" and not is_table
            )
            return owner + (node.args if is_passed else [])
        if isinstance(node, ast.IfExp):
            return [node.body, node.orelse]
        if isinstance(node, ast.ListComp | ast.GeneratorExp):
            return [node.elt]
        if isinstance(node, ast.BoolOp | ast.Dict):
            return node.values
        if isinstance(node, ast.Starred | ast.NamedExpr | ast.Subscript):
            return [node.value]
        if isinstance(node, ast.BinOp):
            return [node.left, node.right]
        return getattr(node, "elts", [])

    def _keep(self, template):
        for line in map(str.strip, template.split("\n")):
            prose = _NO_WORDS.sub("", line)
            is_frame = line.count("{") > 1 and re.search(r"[\w:.] +\{", line)
            is_prose = _PROSE.search(prose) and not re.fullmatch(r"[\w./-]+", line)
            letters, values = len(re.findall("[A-Za-z]", prose)), line.count("{")
            is_short = values < 3 and letters < 3 and len(re.sub(r"\{\w+\}|\W", "", line)) < 6
            matches_anything = values > 2 if letters == 0 else is_short
            if (is_frame or is_prose) and not matches_anything:
                self.templates.add(line)


def _assigned(node):
    """Each target of a statement, a loop or a call of append, with the value that it gets."""
    if isinstance(node, ast.comprehension | ast.For):
        yield node.target, node.iter
    elif isinstance(node, ast.Call) and _name(node.func) in ("append", "extend") and isinstance(node.func, ast.Attribute):
        yield from ((node.func.value, value) for value in node.args)
    elif isinstance(node, ast.Assign | ast.AugAssign | ast.AnnAssign | ast.NamedExpr):
        for target in node.targets if isinstance(node, ast.Assign) else [node.target]:
            if isinstance(target, ast.Tuple):
                is_tuple = isinstance(node.value, ast.Tuple) and len(node.value.elts) == len(target.elts)
                yield from zip(target.elts, node.value.elts if is_tuple else [node.value] * len(target.elts), strict=True)
            else:
                yield target, node.value


def _template(parts):
    """Strings and expressions as one template: a value has its last identifier, with a number where that comes again."""
    counts = defaultdict(int)
    template = ""
    for part in parts:
        if isinstance(part, ast.AST):
            names = [_name(node) for node in ast.walk(part) if isinstance(node, ast.Name | ast.Attribute)] or ["value"]
            name = names[0].strip("_").lower() if isinstance(part, ast.Name | ast.Attribute) else names[-1].strip("_").lower()
            counts[name] += 1
            part = f"{{{name}{counts[name] if counts[name] > 1 else ''}}}"
        template += part
    return template


if __name__ == "__main__":
    entries = {shape(text) for text in catalogue("zh", "error")}
    for text in sorted(error_templates()):
        if shape(text) not in entries:
            quoted = text.replace("\\", "\\\\").replace('"', '\\"')
            sys.stdout.write(f'\nmsgctxt "error"\nmsgid "{quoted}"\nmsgstr ""\n')
