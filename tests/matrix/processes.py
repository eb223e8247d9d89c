# SPDX-License-Identifier: Apache-2.0
"""Commands in groups of their own, each under a time limit, all of them ended with the run that started them."""

from __future__ import annotations

import contextlib
import fcntl
import os
import signal
import subprocess
import tempfile
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

TIMED_OUT = 124
_GRACE_S = 20
# Engines fill the machine: one test run at a time starts them, whoever else tests here.
ENGINE_LOCK = "DCP_ENGINE_LOCK"


@dataclass(frozen=True)
class Finished:
    """What came of a command: exit status (124: it ran past its limit), output, seconds."""

    code: int
    output: str
    seconds: float


class Processes:
    """Starts commands and knows which are running."""

    def __init__(self) -> None:
        self._running: set[subprocess.Popen[bytes]] = set()
        self._lock = threading.Lock()
        self._is_over = False

    def run(
        self, command: Sequence[str], *, log: Path, limit_s: float, cwd: Path, environment: Mapping[str, str]
    ) -> Finished:
        """Run a command to its end, or to its limit."""
        started = time.monotonic()
        with log.open("w") as output:
            process = self._start(command, output, cwd, environment)
            try:
                code = process.wait(timeout=limit_s)
            except subprocess.TimeoutExpired:
                code = TIMED_OUT
            finally:
                end_group(process)
                with self._lock:
                    self._running.discard(process)
        return Finished(code, log.read_text(errors="replace"), time.monotonic() - started)

    def _start(
        self, command: Sequence[str], output: object, cwd: Path, environment: Mapping[str, str]
    ) -> subprocess.Popen[bytes]:
        with self._lock:
            if self._is_over:
                raise KeyboardInterrupt
            process = subprocess.Popen(
                command,
                stdout=output,  # type: ignore[arg-type]
                stderr=subprocess.STDOUT,
                stdin=subprocess.DEVNULL,
                cwd=cwd,
                env=dict(environment),
                start_new_session=True,
            )
            self._running.add(process)
        return process

    def stop(self) -> None:
        """Ask all running commands to end, and start no others."""
        with self._lock:
            self._is_over = True
            for process in self._running:
                with contextlib.suppress(ProcessLookupError):
                    process.terminate()


def end_group(process: subprocess.Popen[bytes]) -> None:
    """End a command and what it started: asked first, so that it can end sessions that it opened itself."""
    if process.poll() is None:
        process.terminate()
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(timeout=_GRACE_S)
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


@contextlib.contextmanager
def engine_lock(path: Path | None = None) -> Iterator[None]:
    """Hold the machine's engines, among threads and among processes."""
    default = Path(tempfile.gettempdir()) / f"vllm-dcp-hybrid-engines.{os.getuid()}.lock"
    path = path or Path(os.environ.get(ENGINE_LOCK, default))
    with path.open("a") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield
