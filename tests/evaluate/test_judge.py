"""Grades of a judge behind an HTTP address, asked by the openai client."""

import json
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest

from finetune.errors import CommandError
from finetune.evaluate.scorers import scorer
from finetune.run.directory import RunDirectory


@pytest.fixture
def judge():
    """A server that answers with what `server.reply` makes of a request, and keeps the requests."""

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self):
            request = json.loads(self.rfile.read(int(self.headers["content-length"])))
            self.server.requests.append((self.path, request, self.headers["authorization"]))
            status, text = self.server.reply(request)
            choice = {"index": 0, "finish_reason": "stop", "message": {"role": "assistant", "content": text}}
            body = {"id": "1", "object": "chat.completion", "created": 1, "model": request["model"], "choices": [choice]}
            content = json.dumps(body if status == 200 else {"error": {"message": text}}).encode()
            self.send_response(status)
            self.send_header("content-type", "application/json")
            self.send_header("content-length", str(len(content)))
            self.end_headers()
            self.wfile.write(content)

        def log_message(self, *_):
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.requests, server.reply = [], lambda _: (200, "Good.\n8")
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield server
    server.shutdown()
    server.server_close()


def judge_score(server):
    return scorer("judge", judge_url=f"http://127.0.0.1:{server.server_port}/v1", judge_model="grader")


def test_a_grade_is_the_last_number_of_the_reply(judge, monkeypatch):
    monkeypatch.setenv("FINETUNE_JUDGE_KEY", "a-key")
    for reply, grade in (("10", 1.0), ("It has 3 faults.\n**7**", 0.7), ("0", 0.0)):
        judge.reply = lambda _, reply=reply: (200, reply)
        assert judge_score(judge).score_answer("question", "right", f"answer {reply}").score == grade
    path, request, key = judge.requests[0]
    assert (path, request["model"], key) == ("/v1/chat/completions", "grader", "Bearer a-key")
    assert all(text in request["messages"][1]["content"] for text in ("question", "right", "answer 10"))


def test_a_grade_is_asked_for_once_and_kept_in_the_run(judge, home, kept_run):
    run = RunDirectory(kept_run(home))
    for _ in range(2):
        score = judge_score(judge)
        score.score_answer.keep_in(run)
        assert [score.score_answer("q", "a", answer).score for answer in ("a", "b", "a")] == [0.8, 0.8, 0.8]
    assert len(judge.requests) == 2
    (journal,) = (run.path / "evaluations").glob("judge-*.jsonl")
    journal.write_text("{damaged\n")
    score = judge_score(judge)
    score.score_answer.keep_in(run)
    assert score.score_answer("q", "a", "a").score == 0.8 and len(judge.requests) == 3


@pytest.mark.parametrize("reply", ["", "excellent", "11", "-", "4711", "1\nbecause"])
def test_a_reply_without_a_grade_ends_in_a_sentence(judge, reply):
    judge.reply = lambda _: (200, reply)
    with pytest.raises(CommandError, match="no grade from 0 to 10"):
        judge_score(judge).score_answer("q", "a", "b")


@pytest.mark.parametrize("url, model", [("", "m"), ("localhost:1", "m"), ("file:///etc/passwd", "m"), ("http://x", "")])
def test_what_is_no_address_is_refused(url, model):
    with pytest.raises(CommandError, match="--judge-url"):
        scorer("judge", judge_url=url, judge_model=model)


def test_a_judge_that_refuses_or_is_not_there_ends_in_a_sentence(judge):
    judge.reply = lambda _: (401, "no such key")
    score = judge_score(judge)
    with pytest.raises(CommandError, match="no such key"):
        score.score_answer("q", "a", "b")
