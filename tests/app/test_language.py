"""The page in Chinese: every marked text has its Chinese with the same values, and the browser's language decides."""

import ast
import re
from pathlib import Path

import pytest
from browser import NAMES, OPTION
from test_rail import GPU, live_run

from app import language
from app.language import SCRIPT_CALL, catalogue, preferred_language, script_texts, tr, tr_n, use_language
from app.page import PAGES
from app.views import new_run
from app.views.markup import render
from app.views.words import setting_name
from finetune import errors
from finetune.errors import FinetuneError
from finetune.evaluate.results import _MEASURES
from finetune.events import CHARTS
from finetune.planner.plan import VERDICTS
from finetune.run.state import COMPARED, NOT_COMPARED
from finetune.settings.schema import GROUPS

APP = Path(language.__file__).parent
ZH = catalogue("zh")


def marked():
    """Each text that Python or a script marks for the catalogue, and those of the engine that are a closed list."""
    texts = set()
    for path in APP.rglob("*.py"):
        for call in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(call, ast.Call) and isinstance(call.func, ast.Name) and call.func.id in ("tr", "tr_n", "mark"):
                argument = call.args[0]
                branches = [argument.body, argument.orelse] if isinstance(argument, ast.IfExp) else [argument]
                branches = argument.values if isinstance(argument, ast.Dict) else branches
                texts |= {branch.value for branch in branches if isinstance(branch, ast.Constant)}
    texts |= {error.title for error in vars(errors).values() if isinstance(error, type) and issubclass(error, FinetuneError)}
    texts |= {*GROUPS, *VERDICTS, *VERDICTS.values(), COMPARED, NOT_COMPARED}
    texts |= ZH.keys() & {setting_name(field.name) for field in new_run.fields()}
    texts |= {chart.title for chart in CHARTS.values()} | {title for title, *_ in _MEASURES if title}
    texts |= {field.row.description for field in new_run.fields()}
    for path in [*APP.glob("*.js"), *APP.glob("templates/*.html")]:
        texts |= {call[1] for call in SCRIPT_CALL.finditer(path.read_text(encoding="utf-8"))}
    return texts


def test_every_text_has_its_chinese_with_its_values_and_no_option_syntax_and_the_catalogue_has_no_other():
    assert sorted(marked() - ZH.keys()) == []
    assert sorted(ZH.keys() - marked()) == []
    fields, entries = re.compile(r"\{(\w*)\}"), ZH.items()
    assert [text for text, chinese in entries if set(fields.findall(text)) != set(fields.findall(chinese))] == []
    assert [text for text in marked() if OPTION.search(text)] == []


@pytest.mark.parametrize(
    "cookie, accepted, code",
    [
        ("", "zh-CN,zh;q=0.9,en;q=0.8", "zh"), ("", "de,en;q=0.8,zh;q=0.2", "en"), ("", "fr", "en"), ("", "", "en"),
        ("ft_language=zh", "en", "zh"), ("a=b; ft_language=en; c=d", "zh", "en"), ("ft_language=xx", "zh-TW", "zh"),
    ],
)  # fmt: skip
def test_the_cookie_decides_then_what_the_browser_prefers(cookie, accepted, code):
    assert preferred_language(cookie, accepted) == code


def test_the_language_is_that_of_the_request_and_scripts_get_only_the_texts_that_they_use():
    with use_language("zh"):
        assert tr("Runs") == "训练记录" and tr_n("{n} row", "{n} rows", 1200) == "1,200 行"
    assert tr("Runs") == "Runs" and tr_n("{n} row", "{n} rows", 1) == "1 row"
    assert "Copy image" in script_texts("zh") and "Choose the GPU" not in script_texts("zh")
    assert script_texts("en") == {}


def test_every_module_of_the_page_has_its_texts_translated_and_styles_have_none():
    assert [path.name for path in APP.glob("*.css") if re.search(r'content: *"[^"]*[A-Za-z]', path.read_text("utf-8"))] == []
    paths = [path for folder in ("pages", "views") for path in (APP / folder).glob("*.py")]
    untranslated = {path.relative_to(APP).as_posix() for path in paths if not re.search(r"\btr\(", path.read_text("utf-8"))}
    assert untranslated == WITHOUT_TEXTS


def test_the_rail_is_chinese():
    with use_language("zh"):
        parts = [render("rail", address=address, tab="", run=None) for address, _, _ in PAGES]
        parts += [render("rail_status", live=live, gpus=[GPU]) for live in (None, live_run("1", 60, 960, 20 * 2**30))]
        parts.append(render("rail_status", live=None, gpus=[]))
    html = "".join(parts)
    shown = re.findall(r"(?:aria-label|placeholder|title|data-title|data-label)=\"([^\"]*)\"", html)
    shown += re.sub(r"<[^>]*>", "\n", html).split("\n")
    assert [text for text in shown if re.search(r"[A-Za-z]{2,}", NAMES.sub("", text))] == []


#: Modules of the page that show no text of their own, or only through others.
WITHOUT_TEXTS = {"pages/__init__.py", "views/__init__.py"}
