# SPDX-License-Identifier: Apache-2.0
"""The managed server: waited for, diagnosed, and gone afterwards."""

from __future__ import annotations

import os
import sys
import time
from pathlib import Path

import pytest

from vllm_dcp_hybrid.cli import server as server_module
from vllm_dcp_hybrid.cli.client import Client, RequestFailed, metric_total
from vllm_dcp_hybrid.cli.server import Server, ServerFailed, free_port, last_line

FAKE = [sys.executable, str(Path(__file__).with_name("fake_server.py"))]


def start(tmp_path: Path, *flags: str) -> Server:
    return Server([*FAKE, *flags], port=free_port(), log=tmp_path / "log", environment=os.environ)


def ignore(seconds: float, line: str) -> None:
    pass


def is_running(pid: int) -> bool:
    return bool(list(server_module._members(pid)))


def test_ready_server_answers_and_is_gone_afterwards(tmp_path: Path) -> None:
    with start(tmp_path) as server:
        assert server.wait_until_ready(30, ignore) < 30
        pid = server._process.pid
        assert is_running(pid)
        assert server.client.post("/v1/completions", {"prompt": [], "max_tokens": 1}) == {"choices": []}
        assert list(server.client.stream_text({"prompt": "x"})) == ["he", "llo\n", ""]
        assert metric_total(server.client.metrics(), "vllm:prefix_cache_hits") == 128.0
    assert not is_running(pid)


def test_paused_server_answers_after_it_is_resumed(tmp_path: Path) -> None:
    with start(tmp_path) as server:
        server.wait_until_ready(30, ignore)
        server.pause()
        assert not server.client.is_healthy()
        server.resume()
        server.wait_until_ready(30, ignore)


def test_paused_server_ends_when_asked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(server_module, "_SECONDS_TO_STOP", 60)
    with start(tmp_path) as server:
        server.wait_until_ready(30, ignore)
        server.pause()
        begin = time.monotonic()
    assert time.monotonic() - begin < 50


def test_progress_shows_the_last_line_of_the_log(tmp_path: Path) -> None:
    seen = []
    with pytest.raises(ServerFailed, match="not ready after"), start(tmp_path, "--never-ready") as server:
        server.wait_until_ready(3, lambda seconds, line: seen.append(line))
    assert seen[-1] == "GPU KV cache size: 1,234 tokens"


def test_failed_start_names_the_cause_and_shows_the_log(tmp_path: Path) -> None:
    cause = "ValueError: interleave 3 does not divide 128"
    with pytest.raises(ServerFailed) as caught, start(tmp_path, "--fail", cause) as server:
        server.wait_until_ready(30, ignore)
    text = str(caught.value)
    assert "ended with status 3" in text
    assert f"Cause: {cause}" in text
    assert "starting up" in text
    assert str(tmp_path / "log") in text


def test_words_about_errors_are_no_cause(tmp_path: Path) -> None:
    log = tmp_path / "log"
    server = Server(FAKE, port=1, log=log, environment={})
    log.write_text(
        "WARNING 11-29 15:18:01 [a.py:1] Found ulimit of 20000. This can cause errors like `OSError: too many files`.\n"
        "(EngineCore pid=1) ERROR 11-29 15:18:01 [core.py:1] pydantic_core.ValidationError: 1 validation error\n"
        "(EngineCore pid=1) ERROR 11-29 15:18:01 [core.py:1]   Assertion failed, 3 does not divide 128\n"
        "(EngineCore pid=1) ERROR 11-29 15:18:01 [core.py:1] \n"
        "(APIServer pid=2) RuntimeError: Engine core initialization failed. See root cause above.\n"
    )
    cause = server.diagnosis().splitlines()[0]
    assert cause == "Cause: pydantic_core.ValidationError: 1 validation error Assertion failed, 3 does not divide 128"


def test_stubborn_processes_are_killed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(server_module, "_SECONDS_TO_STOP", 1.0)
    with start(tmp_path, "--stubborn") as server:
        server.wait_until_ready(30, ignore)
        pid = server._process.pid
    deadline = time.monotonic() + 5
    while is_running(pid) and time.monotonic() < deadline:
        time.sleep(0.1)
    assert not is_running(pid)


def test_server_is_gone_after_an_exception(tmp_path: Path) -> None:
    with pytest.raises(KeyboardInterrupt), start(tmp_path) as server:  # noqa: PT012
        pid = server._process.pid
        raise KeyboardInterrupt
    assert not is_running(pid)


def test_shared_memory_of_the_server_is_removed_and_no_other(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(server_module, "SHARED_MEMORY", tmp_path)
    ours, theirs = tmp_path / "1-tp:0-cpushm_0", tmp_path / "2-tp:0-cpushm_0"
    for file in (ours, theirs):
        file.write_bytes(bytes(4096))
    with start(tmp_path, "--map", str(ours)) as server:
        server.wait_until_ready(30, ignore)
    assert not ours.exists()
    assert theirs.exists()


def test_refused_request_says_what_the_server_said(tmp_path: Path) -> None:
    with start(tmp_path, "--refuse") as server:
        server.wait_until_ready(30, ignore)
        with pytest.raises(RequestFailed, match="status 500: no thank you"):
            server.client.post("/v1/completions", {})


def test_nobody_listening_is_not_healthy() -> None:
    client = Client("127.0.0.1", free_port())
    assert not client.is_healthy()
    with pytest.raises(RequestFailed, match="ConnectionRefusedError"):
        client.metrics()


def test_prefixes_of_log_lines_are_left_out(tmp_path: Path) -> None:
    log = tmp_path / "log"
    log.write_text("(Worker_TP0_DCP0 pid=1) (Worker_TP1_DCP1 pid=2) INFO 11-29 15:18:01 [a.py:1] loading\n\n")
    assert last_line(log) == "loading"
    log.write_text("")
    assert last_line(log) == ""
