"""New run and Models: in Chinese no English but names, also of a plan first shown in English; no option syntax."""

import html
import re
from dataclasses import replace
from types import SimpleNamespace

import pytest
import written_runs
from browser import OPTION

from app.language import spoken
from app.pages.new_run import NewRun
from app.planning.blocker import Blocker
from app.planning.refused_rows import Problem
from app.views import data, new_run
from app.views.markup import as_on_page, render
from app.views.run_figures import chosen
from app.views.words import in_words
from finetune.errors import DataError
from finetune.planner.plan import Alternative, ResourceCheck, Shortfall, Suggestion, Verdict
from finetune.recipe import load_recipe
from finetune.units import GIB
from tests.app.test_language import marked

CHANGES = ("load_in_4bit=true load_in_8bit=false", "max_length=512 excess_length=drop", "layer_offloading=cpu")
#: As finetune.data says them.
REFUSED = [
    "15 of 60 row(s) can't be trained on:", "  8 x messages[1].content: the answer is empty (a.jsonl, row 8, 15, 22, ...)",
    "  a.jsonl, row 3: has no assistant turn; there is nothing to train on",
]  # fmt: skip


def plan_of(verdict):
    """A plan with everything that Fit shows."""
    fits, now = verdict != Verdict.NO_FIT, written_runs.plan(100)
    alternatives = [
        Alternative("", 11 * GIB, 13 * GIB, 0.5, 3100.0, Verdict.FITS, "", "", chosen=True),
        Alternative("", 9 * GIB, 10 * GIB, 0.6, 2900.0, Verdict.FITS, "", "load_in_4bit=true"),
        Alternative("", 20 * GIB, 25 * GIB, 0.4, 3300.0, Verdict.NO_FIT, "", "activation_checkpointing=false"),
    ]
    suggestions = [Suggestion(override, GIB, 5 * GIB, "slower") for override in CHANGES]
    return replace(
        now, verdict=verdict, headroom_bytes=9 * GIB if fits else -5 * GIB, budget_bytes=(22 if fits else 8) * GIB,
        suggestions=() if fits else tuple(suggestions), alternatives=tuple(alternatives),
        shortfall=None if fits else Shortfall(5 * GIB, "weights", 5 * GIB, "Qwen/Qwen3"),
        forecast=replace(now.forecast, method="dry run", notes=()),
        checks=(ResourceCheck("disk", GIB, 9 * GIB, enough=True),), reasons=dict.fromkeys(now.reasons, "as the recipe sets it"),
    )  # fmt: skip


def new_run_of(verdict):
    planned, edited = (
        plan_of(verdict),
        SimpleNamespace(model="tiny", data="31", is_complete=True, values={"lora_r": 8}, recipe=load_recipe("tiny-cpu")),
    )
    refused = Blocker(DataError.title, REFUSED, label=in_words("dataset.on_bad_rows=skip"), override="x")
    return [
        new_run.answer(planned), new_run.answer(planned, refused), new_run.plans(planned, is_complete=True),
        new_run.plans(replace(planned, alternatives=()), is_complete=False), new_run.settings(edited, planned),
        new_run.ready(edited, planned, None)[0], new_run.ready(edited, planned, refused)[0], new_run.sentence(edited),
        chosen(planned), new_run.gpu_panel(edited), new_run.data_panel(edited, []),
        new_run.model_panel([], edited, {}, "31", ""), render("new_run"),
    ]  # fmt: skip


def data_pages():
    recipe, row = load_recipe("tiny-cpu"), {"file": "a.jsonl", "row": 2, "field": None, "reason": "the answer is empty"}
    wrong = {**row, "reason": "unknown role 'usr'; did you mean user?"}
    kinds = [Problem("31", (row, row)), Problem("x", (wrong,))]
    report = {
        "rows_refused": [row, row, wrong], "warnings": [], "trained_token_share": 0.5, "format": "messages", "rows_used": 597,
        "rows_read": 600, "pictures": {"pictures": 3, "largest": (640, 480)}, "lengths": {"p50": 90, "max": 148},
    }  # fmt: skip
    pictures = [{"width": 640, "height": 480, "address": address} for address in ("", "data:")]
    answer = {
        "report": report, "eval_report": {"rows_used": 28}, "lengths": [90, 148], "sequences": 597, "index": 40, "tokens": 90,
        "marked": [["31", True]], "trained_tokens": 20, "pictures": pictures,
    }  # fmt: skip
    left_out = recipe.model_copy(update={"dataset": recipe.dataset.model_copy(update={"on_bad_rows": "skip"})})
    return [
        data.head(answer, recipe), data.problems(kinds, answer, recipe),
        data.problems(kinds, answer, left_out), data.problems([], answer, recipe), data.refused_row(0, 0, kinds[0], "31"),
        data.marked(answer), data.marked({**answer, "sequences": 0}),
        re.sub(r"<div class=.*</div>", "", data.lengths(answer, recipe)), data.lengths({**answer, "lengths": []}, recipe),
    ]  # fmt: skip


MODEL = {"run": "tiny", "base": "tiny", "kind": "GGUF", "path": "tiny", "size": "1 GiB"}
PAGES = {
    "fits": lambda: new_run_of(Verdict.FITS), "too big": lambda: new_run_of(Verdict.NO_FIT),
    "slow": lambda: new_run_of(Verdict.VERY_SLOW), "data": data_pages,
    "models": lambda: [render("models", models=models, shown=str) for models in ([MODEL], [])],
}  # fmt: skip


@pytest.mark.parametrize("name", PAGES)
def test_no_text_of_a_page_has_option_syntax(name):
    shown = "".join(PAGES[name]())
    texts = re.findall(r"(?:aria-label|placeholder|title|data-title)=\"([^\"]*)\"", shown) + re.split(r"<[^>]*>", shown)
    assert [text for text in texts if OPTION.search(html.unescape(text))] == []


def test_no_text_of_the_catalogue_has_option_syntax():
    assert [text for text in marked() if OPTION.search(text)] == []


def test_errors_that_the_page_can_show_have_its_labels_in_place_of_options():
    assert as_on_page("Use --score loss.") == "Use “Score: Loss only, no answers”."
    assert as_on_page("Give rows of your own: --data FILE.") == "Give rows of your own: “Rows”."


def test_a_message_of_the_engine_names_settings_as_a_recipe_does():
    assert (
        as_on_page("Set max_length=512, or dataset.on_bad_rows=skip.") == "Set max_length: 512, or dataset.on_bad_rows: skip."
    )
    assert as_on_page("the row says a=b") == "the row says a=b"


def test_a_plan_that_was_shown_in_english_is_chinese_for_a_chinese_reader(context, monkeypatch):
    asked = []
    answer = plan_of(Verdict.FITS).as_json()
    monkeypatch.setattr(context.planner, "call", lambda *_, **__: asked.append(1) or answer)
    page = NewRun(context)
    context.draft.change(model_name_or_path="tiny")
    assert ">Fits</h2>" in page.plan(complete=True)["parts"]["answer"]
    with spoken("zh"):
        shown = page.plan(complete=True)["parts"]
    assert ">放得下</h2>" in shown["answer"] and len(asked) == 1
    assert "32 比特权重，不用梯度检查点" in shown["plans"]
