"""The pages of runs in Chinese: in each state, compared, scored, as a sweep, in a chart and in a chat."""

import dataclasses
import json
import re
import time
from types import SimpleNamespace

import pytest
from fastapi import FastAPI
from fastapi.testclient import TestClient
from test_language import NAMES as LANGUAGE_NAMES
from test_language import english_in
from written_runs import make_run, steps

from app.chat.chats import Answer, Turn
from app.context import Context
from app.language import spoken
from app.live import LiveRun
from app.page import build_page
from app.pages import chat
from app.scores import Scores
from app.views import run, run_head, run_page, runs, scores
from app.views.chart_series import layout
from app.views.compare import comparison
from app.views.engine_texts import of_engine
from app.views.run_row import row_of
from app.web.page_filter import _CONFIG, _SHOW_VALUE, _TEXTS, PageFilter, _translated
from app.web.series import series_of
from app.workspace import Workspace
from finetune.card import find_card
from finetune.evaluate.paired import Difference, format_difference
from finetune.evaluate.results import NoCall
from finetune.events import Checkpoint, Evaluation, OutOfMemory, Result, Retry, RunWarning, Sample, Start, State
from finetune.run.out_of_memory import explanation_lines
from finetune.sweep.halving import RULE
from finetune.units import GIB

TABS = ("overview", "samples", "log")
MEMORY = OutOfMemory(
    phase="train", message="", asked_bytes=2 * GIB, room_bytes=GIB, free_bytes=3 * GIB, free_blocks=4,
    largest_free_block_bytes=GIB, largest_usable_block_bytes=GIB // 2, forecast_allocated_bytes=9 * GIB,
    peak_allocated_bytes=10 * GIB, holders={"12": GIB},
)  # fmt: skip
LOST = "; resume with: finetune resume /runs/one"
DIVERGED = (
    "loss is nan at step 30 The last good checkpoint is checkpoint-20. Usual causes: the learning rate (0.004; try "
    "learning_rate=0.001), fp16, or broken rows."
)
ENDS = {
    "finished": [Result(step=20, eval_loss=0.4), State(state="finished", exit_code=0)],
    "failed": [MEMORY, State(state="failed", message="out of memory in phase train", exit_code=5)],
    "diverged": [State(state="diverged", message=DIVERGED, exit_code=6)],
    "stopped": [State(state="stopped", message=f"stopped at step 30 with a checkpoint{LOST}", exit_code=143)],
    "paused": [State(state="paused", exit_code=7)], "lost": [],
    "queued": [State(state="queued", message="waiting for 2; 1 ahead in the queue")],
}  # fmt: skip
HAPPENED = [
    Start(), *steps(1, 30), Evaluation(step=10, eval_loss=0.5, eval_s=1.0), Evaluation(step=20, eval_loss=0.6, eval_s=1.0),
    Checkpoint(step=20, path="x", bytes=1, save_s=0.1, seal_s=0.1), Sample(step=10, prompt="1", expected="2", answer=""),
    Sample(step=20, prompt="1", expected="2", answer="3"),
    Retry(attempt=2, reason="out of memory in phase train", changes={}), Start(resumed_from="checkpoint-20", step=20),
    RunWarning(message="1"),
]  # fmt: skip
#: Names of settings, files, models and units, which are the same in Chinese.
NAMES = re.compile(
    rf"finetune resume \S+|{LANGUAGE_NAMES.pattern}|checkpoint-\d+|run-\w+|-bit|learning_rate\S*|lora_r|fp16|packing|CUDA|"
    r"nan|KL|rows\.jsonl|EM|JSON|GGUF|BLEU|chrF|ROUGE-L|Q\d_\w+|bit$|rtx-4090|GiB|Shift|Enter|nat\b|^tiny$|Top p|llama\.cpp|"
    r"Ollama|OpenAI|merged|[Tt]oken\b"
)


def english(*parts):
    return [text for text in english_in("\n".join(parts)) if re.search(r"[A-Za-z]{2,}", NAMES.sub("", text))]


@pytest.fixture
def follow(tmp_path):
    """follow(name, *events) -> a followed run with these events."""

    def make(name, *events):
        live = LiveRun(make_run(tmp_path / "runs", name, events), tmp_path / f"{name}.json")
        live.wait()
        return live

    return make


@pytest.mark.parametrize("state", ENDS)
def test_a_run_in_each_state_is_chinese(follow, state):
    live = follow(f"run-{state}", *([] if state == "queued" else HAPPENED), *ENDS[state])
    with spoken("zh"):
        for tab in TABS:
            parts = run_page.changed(live, tab, ())
            assert english(*(html for _, html in parts.values())) == []
        panels = layout(live.digest, live.plan())
        texts = [text["label"] for panel in panels for text in (*panel["lines"], *panel["levels"])]
        assert english(run.plain_curves(live), *texts, *(panel["title"] for panel in panels)) == []


def test_a_running_run_and_one_on_a_cpu_are_chinese(follow):
    live = follow("run-1", *HAPPENED)
    with spoken("zh"):
        for state in ("running", "stopping", "starting"):
            state = SimpleNamespace(state=state, ended=False, message="")
            assert english(run_page.title(live, state), run_page.progress(live, state)) == []
        cpu = dataclasses.replace(live.plan(), card=find_card("cpu"))
        assert english(run_page.figures(live.digest, cpu), run_page.memory(live.digest, cpu), run_page.empty()) == []


def test_lists_of_runs_and_their_comparison_are_chinese(follow, tmp_path):
    lives = [follow(f"run-{state}", *HAPPENED, *ENDS[state]) for state in ("finished", "diverged")]
    plan = lives[1].plan()
    other = dataclasses.replace(
        plan, settings=plan.settings.model_copy(update={"lora_r": 2, "packing": True, "max_steps": None})
    )
    lives[1].plan = lambda: other
    entries = [(f"{time.time_ns()}-1", {"state": name, "message": "2"}) for name in ("waiting", "preparing", "failed")]
    with spoken("zh"):
        rows = [row_of(live, Scores()) for live in lives]
        assert english(runs.controls(), runs.chosen_bar(), runs.runs_table(rows), runs.runs_table([])) == []
        assert english(runs.queue(entries), runs.queue([]), runs.trash([("run-1", tmp_path)]), runs.trash([])) == []
        assert english(runs.undo([("run-1", tmp_path)]), runs.undo([("run-1", tmp_path)] * 2)) == []
        assert english(comparison(lives, rows=rows), comparison(lives[:1])) == []


def test_scores_are_chinese():
    gap, unclear = Difference(0.5, 0.1, 0.9, None), Difference(0.1, -0.1, 0.3, 40)
    model = {
        "exact_match": 0.5, "score": 0.5, "valid": 0.5, "loss": 1.0, "perplexity": 2.7, "token_accuracy": 0.5, "scores": [0.0],
        "fields": {"1": 0.5}, "pairs_in_order": 0.5, "pair_margin": 0.1, "answers": ["1"],
    }  # fmt: skip
    result = {
        "rows": 2, "base": model, "tuned": model, "prompts": ["1"], "references": ["2"], "seconds": 61.0, "score": "sql",
        "score_difference": vars(gap), "exact_match_difference": vars(unclear), "loss_difference": None, "data": "1",
        "reused": 3, "lost": [{"rows_of": "general questions", "rows": 9, "before": 1.0, "now": None, "difference": None}],
    }  # fmt: skip
    with spoken("zh"):
        for change in ({}, {"score": "calls"}, {"score": "exact", "data": None}, {"forgetting": True}):
            assert english(scores.scores({**result, **change}, "differ").replace("sql", "")) == []
        assert english(scores.no_call_note(NoCall(9, 0.5, 0.4, Difference(-0.1, -0.2, -0.05, None)))) == []


def test_an_engines_text_is_translated_with_its_values_and_any_other_stays():
    gap = format_difference(Difference(0.5, -0.1, 0.9, 40), 100, " points", "now - before")
    with spoken("zh"):
        for text in (RULE, gap, DIVERGED, *explanation_lines(MEMORY)):
            assert of_engine(text) != text and english(of_engine(text)) == []
        assert "+50 个百分点" in of_engine(gap) and "40" in of_engine(gap)
        assert of_engine("disk quota exceeded") == "disk quota exceeded"
    assert of_engine(gap) == gap


def test_why_a_run_failed_names_settings_as_a_recipe_does(follow):
    live = follow("run-1", *HAPPENED, *ENDS["diverged"])
    card = run_head.failure(live, live.state())
    assert "try learning_rate: 0.001)" in card and "broken rows. A lower learning rate is" in card


def test_a_chat_is_chinese():
    context = SimpleNamespace(workspace=SimpleNamespace(run=lambda name: None))
    with spoken("zh"):
        turns = [Turn("1"), Turn("2", models=("base",)), Turn("3", done=True)]
        for event in (
            Answer(id="1", model="base", text="", tokens=3, tokens_per_s=2.0, stopped=True, alone=True),
            Answer(id="1", model="tuned", text="", calls=({"name": "3", "arguments": {}},)),
        ):
            turns[0].add(event)
        names = chat._View(context)._names([turns[0]])
        assert english(chat._conversation(turns, {**names, "left": "1"}), chat._conversation([], {}), chat._add_picture()) == []


def test_fields_and_buttons_of_these_pages_are_chinese_and_keep_their_values(tmp_path):
    context = Context(Workspace(tmp_path, tmp_path / "runs"), tmp_path / "temporary")
    config = build_page(context)[0].get_config_file()
    context.close()
    before = f"window.gradio_config = {json.dumps(config, default=str)};</script>"
    with spoken("zh"):
        script = _CONFIG.sub(_translated, before.encode(), 1)
    after = json.loads(script.removeprefix(b"window.gradio_config = ").removesuffix(b";</script>"))
    wanted = {number for name in ("run", "runs", "try") for number in config["page"][name]["components"]}
    for component, now in zip(config["components"], after["components"], strict=True):
        if component["id"] in wanted and component["type"] not in ("timer", "navbar"):
            props, shown = component["props"], now["props"]
            texts = [*_TEXTS, "value"] if component["type"] in _SHOW_VALUE else _TEXTS
            choices = [name for name, _ in shown.get("choices") or []]
            assert english(*(str(shown.get(text) or "") for text in texts), *choices) == [], component["props"].get("elem_id")
            assert [value for _, value in props.get("choices") or []] == [value for _, value in shown.get("choices") or []]
            assert component["type"] in _SHOW_VALUE or props.get("value") == shown.get("value")


def test_a_tick_answers_in_the_language_of_its_request(follow):
    live = follow("run-1", *HAPPENED)
    api = FastAPI()
    workspace = SimpleNamespace(run=lambda name: live.run)
    api.get("/ft/series/{name}")(series_of(SimpleNamespace(workspace=workspace, lives=SimpleNamespace(of=lambda run: live))))
    browser = TestClient(PageFilter(api))

    def tick(language, have=""):
        query = {"tab": "overview", "have": have}
        return browser.get("/ft/series/run-1", params=query, headers={"cookie": f"ft_language={language}"}).json()

    chinese, english_ = tick("zh"), tick("en")
    assert chinese["panels"][0]["title"] == "损失" and "验证集损失" in chinese["parts"]["figures"][1]
    assert english_["panels"][0]["title"] == "Loss" and "Held out" in english_["parts"]["figures"][1]
    assert "panels" not in tick("zh", chinese["version"]) and "panels" in tick("zh", english_["version"])
