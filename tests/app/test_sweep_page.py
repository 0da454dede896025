"""A sweep on the page: a line on Runs, and its arms over each other, each with a page of its own."""

import pytest
from written_runs import make_sweep

from app.pages.run import RunPage
from app.pages.runs import RunsPage
from app.report import main as report_main


@pytest.fixture
def context(context):
    make_sweep(context.workspace.runs, "rates")
    return context


def test_a_sweep_is_a_line_of_its_own_and_its_arms_are_no_runs_of_the_list(context):
    assert context.workspace.list_runs() == []
    line = RunsPage(context).parts()["sweeps"]
    assert 'href="/run?run=rates"' in line and "Learning rate 0.0004 wins with a held-out loss of 0.5000" in line
    assert "clearly behind: Learning rate 0.0001, by 0.4000" in line


def test_the_page_of_a_sweep_has_the_curves_of_its_arms_and_a_link_to_each(context):
    shown_page = RunPage(context).html({"run": "rates"})
    assert "above the median of the finished arms" in shown_page
    assert "rates-1" in shown_page and "rates-2" in shown_page
    changed = RunPage(context).changed("rates", tab="overview")
    arms = changed["parts"]["arms"][1]
    assert arms in shown_page and not changed["alive"]
    assert arms.index('href="/run?run=rates-2"') < arms.index('href="/run?run=rates-1"')


def test_the_report_of_a_sweep_is_one_file_with_the_curves_and_a_line_for_each_arm(context, tmp_path, monkeypatch):
    monkeypatch.setattr("sys.argv", ["report", str(tmp_path / "report.html"), str(context.workspace.runs / "rates")])
    assert report_main() == 0
    page = (tmp_path / "report.html").read_text()
    assert "Learning rate 0.0004 wins with a held-out loss of 0.5000" in page and page.count("<polyline") == 2
    assert "<script" not in page


def test_an_arm_is_opened_by_its_name_and_a_name_that_leads_elsewhere_is_nothing(context):
    assert context.workspace.run("rates-1").path == context.workspace.runs / "rates" / "rates-1"
    assert context.workspace.run("rates") is None and context.workspace.sweep("../runs/rates") is None
    (context.workspace.runs / "rates" / "study.journal").write_text("{}\n")
    assert context.workspace.sweep("rates") is None and context.workspace.list_sweeps() == []
