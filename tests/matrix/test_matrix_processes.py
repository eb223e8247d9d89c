# SPDX-License-Identifier: Apache-2.0
"""Commands: limits, groups, and an end for all of them."""

from __future__ import annotations

import os
import sys
import threading
import time
from pathlib import Path

import pytest
from processes import TIMED_OUT, Finished, Processes, engine_lock


def run(processes: Processes, script: str, directory: Path, limit_s: float = 60) -> Finished:
    return processes.run(
        [sys.executable, "-c", script],
        log=directory / f"{threading.get_ident()}.log",
        limit_s=limit_s,
        cwd=directory,
        environment=os.environ,
    )


def is_running(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


def test_status_and_output_are_reported(tmp_path: Path) -> None:
    done = run(Processes(), "import sys; print('out'); print('err', file=sys.stderr); sys.exit(3)", tmp_path)
    assert done.code == 3
    assert set(done.output.split()) == {"out", "err"}


def test_what_runs_past_its_limit_is_ended_with_all_that_it_started(tmp_path: Path) -> None:
    script = (
        "import subprocess, sys, time\n"
        "print(subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(99)']).pid, flush=True)\n"
        "time.sleep(99)"
    )
    done = run(Processes(), script, tmp_path, limit_s=2)
    assert done.code == TIMED_OUT
    child = int(done.output)
    deadline = time.monotonic() + 5
    while is_running(child) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not is_running(child)


def test_a_run_that_stops_ends_its_commands_and_starts_no_others(tmp_path: Path) -> None:
    processes = Processes()
    found: list[Finished] = []
    thread = threading.Thread(
        target=lambda: found.append(run(processes, "import time; print(1, flush=True); time.sleep(99)", tmp_path))
    )
    thread.start()
    deadline = time.monotonic() + 20
    while not any(log.stat().st_size for log in tmp_path.glob("*.log")) and time.monotonic() < deadline:
        time.sleep(0.05)
    processes.stop()
    thread.join(timeout=20)
    assert found[0].code < 0
    with pytest.raises(KeyboardInterrupt):
        run(processes, "", tmp_path)


def test_only_one_holds_the_engines_at_a_time(tmp_path: Path) -> None:
    events: list[str] = []

    def other() -> None:
        with engine_lock(tmp_path / "lock"):
            events.append("other")

    thread = threading.Thread(target=other)
    with engine_lock(tmp_path / "lock"):
        thread.start()
        time.sleep(0.2)
        events.append("first")
    thread.join(timeout=10)
    assert events == ["first", "other"]
