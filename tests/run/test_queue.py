"""One run at a time on a card; the others wait in order of arrival."""

import subprocess
import sys
import time

from finetune.run.card import Queue

JOIN = "import sys, time; from pathlib import Path; from finetune.run.card import Queue;"
JOIN += "q = Queue(sys.argv[2:]); q.join(Path(sys.argv[1])); print('joined', flush=True); time.sleep(60)"
CARD = ["NVIDIA GeForce RTX 4090"]


def other(name, *cards):
    command = [sys.executable, "-c", JOIN, name, *(cards or CARD)]
    process = subprocess.Popen(command, stdout=subprocess.PIPE)
    process.stdout.readline()
    return process


def test_runs_wait_in_order_and_the_next_continues_when_one_leaves_also_after_the_clock_was_set_back(tmp_path, monkeypatch):
    first, second, mine = other("/first"), other("/second"), Queue(CARD)
    monkeypatch.setattr(time, "time_ns", lambda: 1)
    mine.join(tmp_path / "mine")
    assert mine.ahead() == ["/first", "/second"]
    first.kill(), first.wait()
    assert mine.ahead() == ["/second"]
    second.kill(), second.wait()
    assert mine.ahead() == []


def test_a_ticket_of_a_dead_process_is_removed_and_leaving_frees_the_place_in_the_users_cache_folder(tmp_path, monkeypatch):
    queue = Queue(CARD)
    queue.join(tmp_path)
    (queue.folder / "0-1.json").write_text('{"pid": 4194301, "started_s": 1.0, "run": "/dead"}')
    (queue.folder / "1-1.json").write_text("{half")
    assert queue.ahead() == [] and not (queue.folder / "0-1.json").exists()
    monkeypatch.delenv("FINETUNE_CACHE")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    queue, tickets = Queue(CARD), tmp_path / "finetune" / "queue"
    queue.join(tmp_path)
    assert len(list(tickets.glob("*.json"))) == 1
    queue.leave()
    assert not list(tickets.glob("*.json"))


def test_a_run_waits_for_all_of_its_cards_and_for_no_other(tmp_path):
    first, both = other("/first", "GPU-1"), other("/both", "GPU-1", "GPU-2")
    second, third = Queue(["GPU-2"]), Queue(["GPU-3"])
    second.join(tmp_path), third.join(tmp_path)
    assert third.ahead() == [] and second.ahead() == ["/both"]
    for process in (first, both):
        process.kill(), process.wait()
    assert second.ahead() == []
