# SPDX-License-Identifier: Apache-2.0
"""A `vllm serve` of our own: started, waited for, and always gone afterwards, with all of its processes."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import socket
import subprocess
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from types import TracebackType

from vllm_dcp_hybrid.cli.client import Client
from vllm_dcp_hybrid.cli.machine import SHARED_MEMORY

HOST = "127.0.0.1"
_POLL_SECONDS = 0.25
_SECONDS_TO_STOP = 15.0
_SECONDS_TO_DIE = 10.0
_TAIL_BYTES = 1 << 16
_TAIL_LINES = 15
# "(Worker_TP0 pid=1) INFO 11-29 15:18:01 [file.py:12] text", of which only the text fits a terminal.
_LOG_PREFIX = re.compile(r"^(\([^)]*\)\s*)*([A-Z]+ \d\d-\d\d [\d:]+ \[[^\]]*\]\s*)?")
# The last line of a traceback; refusals of this package are named after what is wrong.
_CAUSE = re.compile(r"^(vllm_dcp_hybrid\.[\w.]+|[\w.]*(Error|Exception)): \S")
# What the outer processes say about any failure of an inner one.
_SYMPTOMS = ("Engine core initialization failed", "WorkerProc initialization failed", "See root cause above")


class ServerFailed(RuntimeError):
    """The server ended, or was not ready in time.  The message holds the cause, if it was found, and the log's tail."""


def free_port() -> int:
    """A port of the loopback interface that nobody listens on."""
    with socket.socket() as probe:
        probe.bind((HOST, 0))
        return int(probe.getsockname()[1])


class Server:
    """A server process and its children, as a context manager.

    Usage::

        with Server(command, port=port, log=path, environment=os.environ) as server:
            server.wait_until_ready(300, on_progress=print)
            server.client.post("/v1/completions", body)

    Args:
        command: arguments that serve a model; host and port are added.
        port: to listen on.
        log: file for all output.
        environment: of the server.
    """

    def __init__(self, command: Sequence[str], *, port: int, log: Path, environment: Mapping[str, str]) -> None:
        self.command = [*command, "--host", HOST, "--port", str(port)]
        self.log = log
        self.client = Client(HOST, port)
        self._environment = dict(environment)
        self._process: subprocess.Popen[bytes] | None = None
        self._shared_memory: set[Path] = set()

    def __enter__(self) -> Server:
        with self.log.open("wb") as output:
            # A session of its own: one signal reaches every child, and the terminal's Ctrl-C reaches none.
            self._process = subprocess.Popen(
                self.command,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                env=self._environment,
                start_new_session=True,
            )
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.stop()

    def wait_until_ready(self, limit_seconds: float, on_progress: Callable[[float, str], None]) -> float:
        """Wait until the server answers.

        Args:
            limit_seconds: longest wait.
            on_progress: called several times per second with the seconds so far and the last line of the log.

        Returns:
            Seconds that it took.

        Raises:
            ServerFailed: it ended, or the limit passed.
        """
        assert self._process is not None, "a server is entered first"
        started = time.monotonic()
        while True:
            seconds = time.monotonic() - started
            status = self._process.poll()
            if status is not None:
                raise ServerFailed(f"the server ended with status {status} after {seconds:.0f} s.\n{self.diagnosis()}")
            if self.client.is_healthy():
                self._shared_memory |= _shared_memory_of(self._process.pid)
                return seconds
            if seconds > limit_seconds:
                raise ServerFailed(f"the server was not ready after {seconds:.0f} s.\n{self.diagnosis()}")
            on_progress(seconds, last_line(self.log))
            time.sleep(_POLL_SECONDS)

    @property
    def process_group(self) -> int:
        """The id that all processes of the server share."""
        assert self._process is not None, "a server is entered first"
        return self._process.pid

    def pause(self) -> None:
        """Take the CPU away from all processes of the server until `resume`."""
        _signal_group(self.process_group, signal.SIGSTOP)

    def resume(self) -> None:
        """Let a paused server go on."""
        _signal_group(self.process_group, signal.SIGCONT)

    def stop(self) -> None:
        """End all processes of the server: asked first, then killed."""
        process, self._process = self._process, None
        if process is None:
            return
        self._shared_memory |= _shared_memory_of(process.pid)
        _signal_group(process.pid, signal.SIGTERM)
        _signal_group(process.pid, signal.SIGCONT)  # a paused process ends when it goes on
        deadline = time.monotonic() + _SECONDS_TO_STOP
        while time.monotonic() < deadline:
            process.poll()  # reaps it, else its group would never be empty
            if not _is_alive(process.pid):
                break
            time.sleep(_POLL_SECONDS)
        else:
            _signal_group(process.pid, signal.SIGKILL)
            process.wait()
            # Children die by themselves after a kill, on a busy machine a moment later.
            deadline = time.monotonic() + _SECONDS_TO_DIE
            while _is_alive(process.pid) and time.monotonic() < deadline:
                time.sleep(_POLL_SECONDS)
        process.wait()
        # vLLM's CPU communicator leaves 4 MiB for each rank behind.
        for file in self._shared_memory:
            file.unlink(missing_ok=True)

    def diagnosis(self) -> str:
        """The cause, where the log names one, and the last lines of the log."""
        lines = _tail(self.log)
        shown = "\n".join(f"  {line}" for line in lines[-_TAIL_LINES:])
        return f"{_cause(lines)}The end of its log, {self.log}:\n{shown or '  (empty)'}"


def last_line(log: Path) -> str:
    """The last line of a log that says something, without its prefix."""
    for line in reversed(_tail(log)):
        _, text = _split(line)
        if text:
            return text
    return ""


def _split(line: str) -> tuple[str, str]:
    """(prefix, text) of a line of vLLM's log."""
    text = _LOG_PREFIX.sub("", line)
    return line.removesuffix(text).strip(), text.strip()


def _cause(lines: Sequence[str]) -> str:
    """The first exception that is no consequence of another, as a paragraph; empty where there is none."""
    entries = [_split(line) for line in lines]
    for place, (prefix, text) in enumerate(entries):
        if _CAUSE.match(text) and not any(symptom in text for symptom in _SYMPTOMS):
            # Some messages go on for a few lines of the same log entry, up to a blank one.
            parts = ["Cause:", text]
            for next_prefix, next_text in entries[place + 1 : place + 3]:
                if next_prefix != prefix or not next_text:
                    break
                parts.append(next_text)
            return " ".join(parts) + "\n"
    return ""


def _tail(log: Path) -> list[str]:
    """The last lines of a file."""
    with log.open("rb") as file:
        file.seek(max(0, file.seek(0, os.SEEK_END) - _TAIL_BYTES))
        return file.read().decode("utf-8", "replace").splitlines()


def _signal_group(group: int, number: int) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.killpg(group, number)


def _is_alive(group: int) -> bool:
    return any(True for _ in _members(group))


def _members(group: int) -> Iterator[Path]:
    """The /proc directories of the processes of a group, without those that are dead and wait to be reaped."""
    for directory in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):  # gone meanwhile
            state, _, process_group = (directory / "stat").read_text().rpartition(")")[2].split()[:3]
            if int(process_group) == group and state != "Z":
                yield directory


def _shared_memory_of(group: int) -> set[Path]:
    """The segments of vLLM's CPU communicator that processes of this group have mapped."""
    found: set[Path] = set()
    for directory in _members(group):
        with contextlib.suppress(OSError):
            for line in (directory / "maps").read_text().splitlines():
                path = "/" + line.partition("/")[2]
                if path.startswith(f"{SHARED_MEMORY}/") and "cpushm" in path and not path.endswith(" (deleted)"):
                    found.add(Path(path))
    return found
