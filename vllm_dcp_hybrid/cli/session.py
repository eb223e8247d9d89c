# SPDX-License-Identifier: Apache-2.0
"""What `demo` and `verify` share: a console that logs well, a working directory, signals, the servers' environment."""

from __future__ import annotations

import contextlib
import shutil
import signal
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from types import FrameType

from rich.console import Console
from rich.markup import escape

from vllm_dcp_hybrid import tiny_models
from vllm_dcp_hybrid.cli.diagnosis import Diagnosis
from vllm_dcp_hybrid.cli.installed import InstalledVLLM
from vllm_dcp_hybrid.cli.server import Server, ServerFailed

# In a log, which has no spinner.
_SECONDS_BETWEEN_LINES = 30.0


class CannotRun(RuntimeError):
    """Why nothing can be run here, and what to do."""


def say(console: Console, text: str, style: str = "") -> None:
    """Print text that is to be copied: no markup, no colours of numbers, no line breaks within commands and paths."""
    console.print(text, style=style, markup=False, highlight=False, soft_wrap=True)


def check_machine(diagnosis: Diagnosis, vllm: InstalledVLLM, tp_size: int) -> None:
    """Whether this machine has what engines of `tp_size` ranks need.

    Raises:
        CannotRun: it has not.
    """
    machine = diagnosis.machine
    if not vllm.is_cpu_build and len(machine.gpus) < tp_size:
        raise CannotRun(
            f"this vLLM is a GPU build, and TP {tp_size} needs {tp_size} GPUs, of which {len(machine.gpus)} are "
            "visible. To run on a CPU, install the CPU build in another environment: "
            "`uv run --extra cpu ...` in a clone."
        )
    problem = machine.shared_memory_problem(tp_size)
    if problem:
        raise CannotRun(problem)


def wait_until_ready(server: Server, limit_seconds: float, console: Console) -> float:
    """Wait for a server behind a spinner; where there is no terminal, with a line now and then.

    Returns:
        Seconds that it took.

    Raises:
        ServerFailed: it ended, or the limit passed.
    """
    with console.status("starting the server") as status:
        last_line_at = 0.0

        def show(seconds: float, line: str) -> None:
            nonlocal last_line_at
            status.update(f"[dim]{seconds:3.0f} s  {escape(line[: max(20, console.width - 12)])}")
            if not console.is_terminal and seconds - last_line_at >= _SECONDS_BETWEEN_LINES:
                last_line_at = seconds
                say(console, f"{seconds:3.0f} s  {line}")

        seconds = server.wait_until_ready(limit_seconds, show)
    say(console, f"ready after {seconds:.0f} s")
    return seconds


def server_environment(
    base: Mapping[str, str],
    *,
    is_cpu: bool,
    tp_size: int,
    dcp_size: int,
    num_numa_nodes: int,
    is_tiny_model: bool = True,
) -> dict[str, str]:
    """The environment of a server; what the user has set stays.

    Args:
        is_tiny_model: whether little memory and no compiler are enough.
    """
    # The model is a local directory: nothing is to be looked up or reported.
    extra = {"HF_HUB_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1"}
    binding = "VLLM_CPU_OMP_THREADS_BIND"
    if is_cpu:
        suited = tiny_models.cpu_environment(tp_size)
        extra |= suited if is_tiny_model else {binding: suited[binding]}
        # With DCP the plugin divides the cores; stock alone stops where there are fewer NUMA nodes than ranks.
        if dcp_size > 1 or num_numa_nodes >= tp_size:
            del extra[binding]
    return {**extra, **base}


@contextlib.contextmanager
def working_directory(keep: Path | None, prefix: str) -> Iterator[Path]:
    """`keep`, or a directory that is deleted unless a server failed, whose message names a log in it."""
    if keep is not None:
        keep.mkdir(parents=True, exist_ok=True)
        yield keep.resolve()
        return
    directory = Path(tempfile.mkdtemp(prefix=prefix))
    try:
        yield directory
    except ServerFailed:
        raise
    except BaseException:
        shutil.rmtree(directory)
        raise
    shutil.rmtree(directory)


@contextlib.contextmanager
def signals_as_interrupts() -> Iterator[None]:
    """`kill` and a closed terminal end a command as Ctrl-C does: through every `finally`."""

    def interrupt(number: int, frame: FrameType | None) -> None:
        raise KeyboardInterrupt

    before = {number: signal.signal(number, interrupt) for number in (signal.SIGTERM, signal.SIGHUP)}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
