"""The report is one file that fetches nothing, shows hostile text as text, and pairs runs on the rows that both answered."""

import json
import re
import shutil
from html.parser import HTMLParser

import pytest

from app.report import runs_report
from finetune.events import EventWriter, ForecastCheck
from finetune.run.directory import RunDirectory

HOSTILE = "<img src=x onerror=alert(1)><script>alert(1)</script>"


@pytest.fixture
def runs(home, kept_run):
    """Two runs with an evaluation each, of the same rows; the second's tuned model is right more often."""
    for name in ("one", "two"):
        kept_run(home / "runs").rename(home / "runs" / name)
        folder = home / "runs" / name / "evaluations"
        folder.mkdir()
        (folder / "scores-json.json").write_text(json.dumps(evaluation(0.25 if name == "one" else 1.0)))
        (folder / "scores-torn.json").write_text('{"rows": 4, ')
    return [RunDirectory(home / "runs" / name) for name in ("one", "two")]


def evaluation(score):
    gap = {"value": 0.5, "low": 0.25, "high": 0.75, "more_rows": None}
    means = dict.fromkeys(("exact_match", "loss", "perplexity", "token_accuracy", "valid"), 0.5)
    rows = {"scores": [score] * 20, "answers": [HOSTILE] * 20, "row_losses": [2 - score] * 20, "row_tokens": [3] * 20}
    model = {**means, **rows, "score": score, "fields": {HOSTILE: 1.0}}
    gaps = {"score_difference": gap, "exact_match_difference": gap, "loss_difference": None}
    return {
        "rows": 20, "base": model, "tuned": model, "prompts": ["p"] * 20, "references": [HOSTILE] * 20, "seconds": 1.0,
        "score": "json", "data": HOSTILE, "reused": 3, **gaps,
    }  # fmt: skip


class Tags(HTMLParser):
    def __init__(self, text):
        super().__init__()
        self.found, self.open, self.text = [], [], ""
        self.feed(text)

    def handle_starttag(self, tag, attributes):
        self.found.append((tag, dict(attributes)))
        if tag not in ("meta", "line", "polyline", "rect", "circle", "i", "br", "progress", "path"):
            self.open.append(tag)

    def handle_endtag(self, tag):
        if self.open and self.open[-1] == tag:
            self.open.pop()

    def handle_data(self, data):
        self.text += data


def test_a_report_is_one_file_that_fetches_nothing_and_shows_text_as_text_and_names_what_cannot_be_read(runs):
    html = runs_report(runs[:1])
    tags = Tags(html)
    assert not {"script", "img", "link", "iframe", "object", "base", "form"} & {tag for tag, _ in tags.found}
    assert not [name for _, values in tags.found for name in values if name.startswith("on") or name in ("src", "action")]
    assert not re.search(r"url\(|@import|https?://", html.partition("</style>")[0])
    assert f"JSON, 20 rows of {HOSTILE}" in tags.text and tags.open == []
    for heading in ("How it went", "Curves, and forecast against measured", "Scores", "Plan", "Data", "Versions"):
        assert f"<h2>{heading}</h2>" in html
    assert "+0.5 (95" in tags.text and "24 rows read: 24 used" in tags.text and "polyline" in {tag for tag, _ in tags.found}
    assert "scores-torn.json can't be read" in Tags(runs_report(runs[:1])).text


def test_what_the_driver_does_not_list_is_unknown_in_words_and_not_a_number(runs):
    writer = EventWriter(runs[0].events)
    peaks = {"predicted_card_used_bytes": 4 * 2**30, "measured_card_used_bytes": 5 * 2**30}
    writer.emit(ForecastCheck(at="end", measured_allocated_bytes=2**30, predicted_context_bytes=2**29, **peaks))
    writer.close()
    text = re.sub(r"\n\s*", "", Tags(runs_report(runs[:1])).text)
    assert "endallocatedno forecast1.00 GiBendCUDA context512 MiBunknown: the driver lists no memory by process, as on" in text
    assert "endwhole GPU, with other programs4.00 GiB5.00 GiB+25.0%" in text


def test_runs_are_paired_on_the_rows_that_both_answered(runs):
    text = Tags(runs_report(runs)).text
    assert "two - one: +0.75" in text and "two - one: -0.75" in text  # the score, and the loss
    other = runs[1].path / "evaluations" / "scores-json.json"
    other.write_text(other.read_text().replace('"p"', '"q"'))
    assert "not scored on the same rows" in Tags(runs_report(runs)).text


def test_a_run_that_has_only_a_plan_is_reported_too(runs):
    for name in ("events.jsonl", "data/report.json", "data/MANIFEST.json"):
        (runs[0].path / name).unlink()
    shutil.rmtree(runs[0].adapter)
    html = runs_report(runs[:1])
    assert "no readable data report" in html and "no result yet" in html


@pytest.mark.slow
def test_the_commands_write_it_and_say_what_is_wrong(runs, home, finetune):
    assert finetune("report", "one")[0] == 0 and (runs[0].path / "report.html").read_text().startswith("<!doctype html>")
    assert finetune("compare", "one", "two", "--output", "both.html")[0] == 0 and (home / "both.html").is_file()
    (home / "file").touch()
    code, output = finetune("report", "one", "--output", "file/report.html")
    assert code == 7 and "can't be written" in output
    assert finetune("compare", "one")[0] == 2 and finetune("report", "none")[0] == 2
