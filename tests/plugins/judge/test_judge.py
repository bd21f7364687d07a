"""A judge over HTTP: a real server in a process of its own fails, stalls and limits."""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from hwrl.errors import ConfigError, EngineError
from hwrl.rollout import Prompt, RewardWorkers
from hwrl_judge import Judge
from tests.support.sources import REPO
from tests.support.speed import slow


class Server:
    def __init__(self, port: int) -> None:
        self.url = f"http://127.0.0.1:{port}/v1"

    def seen(self) -> dict[str, Any]:
        with urllib.request.urlopen(self.url) as answer:
            return dict(json.load(answer))


@pytest.fixture
def server(tmp_path: Path) -> Iterator[Server]:
    pytest.importorskip("openai")
    file = tmp_path / "port"
    process = subprocess.Popen([sys.executable, "-m", "tests.support.judge_server", str(file)], cwd=REPO)
    try:
        deadline_s = time.monotonic() + 600
        while not (file.exists() and file.read_text()):
            assert process.poll() is None and time.monotonic() < deadline_s
            time.sleep(0.02)
        yield Server(int(file.read_text()))
    finally:
        process.kill()
        process.wait()


def ask(judge: Judge, *questions: str) -> list[str | BaseException]:
    async def all_of_them() -> list[str | BaseException]:
        try:
            return await asyncio.gather(*(judge.ask(question) for question in questions), return_exceptions=True)
        finally:
            await judge.close()

    return asyncio.run(all_of_them())


def test_an_answer_comes_also_after_a_failure_a_silence_and_a_limit(
    server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("JUDGES_KEY", "secret")
    judge = Judge(server.url, "judge", api_key_env="JUDGES_KEY", timeout_s=slow(1.0))
    questions = ["hello", "fail once", "stall once", "limit once"]
    assert ask(judge, *questions) == [str(float(len(question))) for question in questions]
    seen = server.seen()
    assert set(seen["keys"]) == {"Bearer secret"}
    first, second = seen["times"]["limit once"]
    assert second - first >= 1.9, "Retry-After says two seconds; the backoff alone is shorter"
    assert [len(seen["times"][question]) for question in questions] == [1, 2, 2, 2]


def test_a_server_that_never_answers_is_an_error_after_the_last_attempt(server: Server) -> None:
    judge = Judge(server.url, "judge", max_retries=1, timeout_s=slow(0.5))
    failed, silent = ask(judge, "fail", "stall")
    assert "out of order" in str(failed) and "timed out" in str(silent).lower()
    assert [len(server.seen()["times"][question]) for question in ("fail", "stall")] == [2, 2]


NO_ANSWERS = [
    '{"choices": [{"mess',
    "<html>busy</html>",
    "null",
    "[]",
    "3",
    "",
    "NaN",
    "[" * 100_000,
    '{"choices": []}',
    '{"choices": null}',
    '{"choices": [{"message": null}]}',
    '{"choices": [{"message": {"content": 7}}]}',
    '{"choices": [{"message": {"content": NaN}}]}',
    '{"choices": [{"message": {"content": ["a"]}}]}',
    '{"error": "out of order"}',
]


def test_an_answer_that_is_no_text_is_asked_for_again_and_then_an_error_that_shows_it(server: Server) -> None:
    judge = Judge(server.url, "judge", max_retries=1)
    again = ask(judge, *(f"raw once:{text}" for text in NO_ANSWERS))
    assert again == [str(float(len(f"raw once:{text}"))) for text in NO_ANSWERS]
    for text, error in zip(NO_ANSWERS, ask(judge, *(f"raw:{text}" for text in NO_ANSWERS)), strict=True):
        assert isinstance(error, EngineError) and server.url in error.what and text[:8] in error.why.replace("\\\\", "")
    assert ask(judge, 'raw:{"choices": [{"message": {"content": null}}]}') == [""]


def test_only_the_text_of_an_answer_is_looked_at(server: Server) -> None:
    choice = '{"message": {"content": "\\ud800a"}}'
    many = f'raw:{{"choices": [{", ".join([choice] * 50_000)}], "usage": [], "id": {{}}}}'
    judge = Judge(server.url, "judge", max_retries=1)
    assert ask(judge, f'raw:{{"choices": [{choice}]}}', "odd limit") == ["?a", str(float(len("odd limit")))]
    began_s = time.process_time()
    json.loads(many[4:])
    read_s = time.process_time() - began_s
    assert ask(judge, many) == ["?a"]
    assert time.process_time() - began_s < 20 * read_s + 0.3, "no object for each choice"


def test_a_success_of_another_status_must_have_an_answer_too(server: Server) -> None:
    for error in ask(Judge(server.url, "judge", max_retries=0), "nothing:202", "nothing:204"):
        assert isinstance(error, EngineError) and "no chat completion" in error.why


def test_an_answer_without_an_end_is_given_up(server: Server) -> None:
    judge = Judge(server.url, "judge", max_retries=0, timeout_s=slow(2.0))
    endless, drip, compressed = ask(judge, "endless", "drip", "compressed")
    assert "more than 4,194,304 bytes" in str(endless)
    assert "timed out" in str(drip).lower()
    assert "compressed" in str(compressed)


def test_no_more_requests_are_open_than_allowed(server: Server) -> None:
    judge = Judge(server.url, "judge", max_concurrency=3)
    answers = ask(judge, *(f"wait:{number}" for number in range(9)))
    assert answers == ["6.0"] * 9
    assert server.seen()["most"] == 3


def test_the_reward_of_the_docs_asks_a_judge_from_a_worker(server: Server, tmp_path: Path) -> None:
    page = (REPO / "docs/rewards.md").read_text()
    (code,) = [part.split("```")[0] for part in page.split("```python\n")[1:] if "Judge(" in part]
    assert code.count("\n") <= 20
    (tmp_path / "judged.py").write_text(code.replace("http://judge:8000/v1", server.url))
    workers = RewardWorkers(f"{tmp_path / 'judged.py'}:judged", decode=lambda ids: "x" * len(ids))
    try:
        prompt = Prompt("Say x.", np.ones(1, dtype=np.int32), "x", row={"rubric": "Is it short?"})
        scores = workers.score(prompt, [np.ones(length, dtype=np.int32) for length in (1, 2, 3)]).result(600)
    finally:
        workers.close()
    assert scores.failure is None and len(scores.metrics) == 3


def test_a_judge_without_its_key_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("openai")
    monkeypatch.delenv("JUDGES_KEY", raising=False)
    with pytest.raises(ConfigError, match="JUDGES_KEY is not set"):
        Judge("http://127.0.0.1:1/v1", "judge", api_key_env="JUDGES_KEY")


def test_without_the_library_the_extra_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(ConfigError, match=r"hwrl\[judge\]"):
        Judge("http://127.0.0.1:1/v1", "judge")
