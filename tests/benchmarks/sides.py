# SPDX-License-Identifier: Apache-2.0
"""Two vLLM releases side by side on the same GPUs: each a Python of its own, asked in turn."""

from __future__ import annotations

import json
import os
import selectors
import socket
import subprocess
import time
from pathlib import Path
from typing import Any


class SideFailed(RuntimeError):
    """A rank ended or did not answer in time."""


class Side:
    """The two ranks of one release, waiting for cases on their standard input."""

    def __init__(self, name: str, python: str, script: Path, arguments: list[str], log_dir: Path) -> None:
        """Start the ranks; `wait_until_ready` comes next.

        Args:
            python: the interpreter that has this release.
            script: what each rank runs, with ``--rank``, ``--port`` and `arguments`.
        """
        self.name = name
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = free.getsockname()[1]
        self.ranks = []
        for rank in range(2):
            command = [python, str(script), "--rank", str(rank), "--port", str(port), *arguments]
            with (log_dir / f"{name}-rank{rank}.log").open("a") as log:
                pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": log}
                # NVLink multicast stays off: it can disturb other users of a shared host.
                environment = {"NCCL_NVLS_ENABLE": "0", **os.environ, "VLLM_LOGGING_STREAM": "ext://sys.stderr"}
                # Unbuffered: what Python has read ahead, a selector does not see.
                self.ranks.append(subprocess.Popen(command, env=environment, bufsize=0, **pipes))
        self.about: dict[str, Any] = {}

    def wait_until_ready(self, limit_s: float = 240) -> None:
        """Read what the side says of itself."""
        self.about = self.read(limit_s)

    def ask(self, request: dict[str, Any], limit_s: float = 60) -> dict[str, Any]:
        """The answer of rank 0 to a request that both ranks get."""
        line = (json.dumps(request) + "\n").encode()
        for rank in self.ranks:
            assert rank.stdin is not None
            try:
                rank.stdin.write(line)
                rank.stdin.flush()
            except BrokenPipeError as error:
                raise SideFailed(f"{self.name}: a rank has ended") from error
        return self.read(limit_s)

    def read(self, limit_s: float) -> dict[str, Any]:
        """The next answer of rank 0; that of rank 1 is waited for as well.

        Raises:
            SideFailed: a rank ended, or the limit passed.
        """
        answer, _ = (self._read_rank(rank, time.monotonic() + limit_s) for rank in range(2))
        return answer

    def _read_rank(self, rank: int, deadline: float) -> dict[str, Any]:
        stdout = self.ranks[rank].stdout
        assert stdout is not None
        with selectors.DefaultSelector() as selector:
            selector.register(stdout, selectors.EVENT_READ)
            while True:
                if not selector.select(timeout=max(deadline - time.monotonic(), 0)):
                    raise SideFailed(f"{self.name}: no answer from rank {rank} in time")
                line = stdout.readline()
                if not line:
                    raise SideFailed(f"{self.name}: rank {rank} ended with {self.ranks[rank].wait()}")
                if line.startswith(b"RESULT "):
                    answer: dict[str, Any] = json.loads(line[7:])
                    return answer

    def stop(self) -> None:
        """End both ranks."""
        for rank in self.ranks:
            rank.kill()
            rank.wait()
