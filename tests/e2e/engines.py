# SPDX-License-Identifier: Apache-2.0
"""Real engines for tests: started once per specification and session, and compared by log-probability."""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import random
import signal
import subprocess
import sys
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from vllm_dcp_hybrid import tiny_models
from vllm_dcp_hybrid.cli.installed import find_vllm
from vllm_dcp_hybrid.patching import is_among

START_AND_RUN_LIMIT_S = float(os.environ.get("DCP_TEST_ENGINE_LIMIT_S", "420"))
DRIVER = Path(__file__).with_name("driver.py")

# One either side of the interleave, of a CPU block (128) and of an effective block (256), chunk ends, and long ones.
LENGTHS = (1, 2, 3, 5, 16, 17, 127, 129, 255, 256, 257, 700, 1403, 1500)
REPEATED = (1377, 3000, 1632)


def tokens(length: int, seed: int = 0) -> list[int]:
    """A prompt of random ordinary tokens."""
    source = random.Random(1000 * seed + length)
    return [source.randrange(10, 250) for _ in range(length)]


@dataclass(frozen=True)
class Engine:
    """What distinguishes one engine of the suite from another."""

    kind: str
    tp: int
    dcp: int = 1
    kv_heads: int = 1
    interleave: int = 1
    comm: str = "ag_rs"
    prefix_caching: bool = False
    max_num_batched_tokens: int | None = None
    block_size: int | None = None
    dtype: str | None = None
    skew_kv_heads: bool = False
    gdn_head_size: int = 32
    is_eager: bool = True
    is_on_gpu: bool = False
    python: str = sys.executable
    environment: tuple[tuple[str, str], ...] = ()
    extra: tuple[tuple[str, Any], ...] = field(default=())

    def arguments(self) -> dict[str, Any]:
        """Keyword arguments of ``vllm.LLM``."""
        arguments: dict[str, Any] = {
            **tiny_models.engine_arguments(self.kind),
            "tensor_parallel_size": self.tp,
            "decode_context_parallel_size": self.dcp,
            "enforce_eager": self.is_eager,
            "max_model_len": 4096,
            "max_num_seqs": 8,
            "enable_prefix_caching": self.prefix_caching,
        }
        if self.dcp > 1:
            arguments["cp_kv_cache_interleave_size"] = self.interleave
            arguments["dcp_comm_backend"] = self.comm
        if self.is_on_gpu:
            arguments |= gpu_arguments(self.tp)
        elif self.kind == "lfm2":
            arguments |= short_conv_worker()
        for name in ("max_num_batched_tokens", "block_size", "dtype"):
            if getattr(self, name) is not None:
                arguments[name] = getattr(self, name)
        # Objects are written as JSON, since an engine is a key.
        extra = {name: json.loads(value) if str(value).startswith("{") else value for name, value in self.extra}
        return {**arguments, **extra}


# Releases whose short convolutions do not run on every CPU, and the worker that helps.
SHORT_CONV_WORKERS = {
    "<0.25": "torch_short_conv.TorchShortConvWorker",
    ">=0.29,<0.32": "plain_conv.PlainConvWorker",
}


def short_conv_worker() -> dict[str, str]:
    """What an engine of the installed vLLM needs to run short convolutions on this CPU."""
    vllm = find_vllm()
    if vllm is None:
        return {}
    workers = [worker for releases, worker in SHORT_CONV_WORKERS.items() if is_among(vllm.version, releases)]
    return {"worker_cls": workers[0]} if workers else {}


def gpu_arguments(tp: int) -> dict[str, Any]:
    """What an engine on CUDA devices needs, where there may be fewer devices than ranks."""
    import torch

    # Engines may run side by side: none claims most of the device.
    arguments: dict[str, Any] = {"kv_cache_memory_bytes": 1 << 30, "gpu_memory_utilization": 0.2}
    if torch.cuda.device_count() < tp:
        # Ranks share devices: a memory profile sees the other ranks, and peer access has no peer.
        arguments |= {
            "worker_cls": "one_gpu.OneGPUWorker",
            "distributed_executor_backend": "mp",
            "disable_custom_all_reduce": True,
        }
    return arguments


@dataclass(frozen=True)
class Run:
    """What an engine answered, and its log."""

    phases: list[list[dict[str, Any]]]
    log: str

    @property
    def scored(self) -> list[dict[str, Any]]:
        """The requests whose prompts were scored."""
        return self.phases[0]

    @property
    def decoded(self) -> list[dict[str, Any]]:
        """The batch of long generations."""
        return self.phases[1]


def phases(engine: Engine) -> list[dict[str, Any]]:
    """The work of every engine: scored prompts, long generations and, with prefix caching, repeats."""
    work: list[dict[str, Any]] = [
        {"prompts": [tokens(length) for length in LENGTHS], "max_tokens": 8, "score_prompt": True},
        {"prompts": [tokens(length, seed=1) for length in (3, 90, 300, 1100)], "max_tokens": 64},
        # A prompt of one token, after the pool's blocks have had other owners.
        {"prompts": [tokens(1)], "max_tokens": 8},
    ]
    repeats = [tokens(length, seed=2) for length in REPEATED]
    shared = tokens(550, seed=3)
    prefixed = [[*shared, *tokens(tail, seed=4)] for tail in (1, 7, 130)]
    # Without prefix caching these are the oracle of the warm answers.
    work += [{"prompts": repeats, "max_tokens": 8}] * 2
    work += [{"prompts": [[*shared, 11]], "max_tokens": 4}, {"prompts": prefixed, "max_tokens": 8}]
    return work


class Engines:
    """Starts engines on demand, one at a time, and remembers their answers."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self._runs: dict[Engine, Run] = {}
        self._numbers = itertools.count(1)

    def model(self, engine: Engine) -> Path:
        """The engine's tiny checkpoint, made where it does not exist."""
        name = f"{engine.kind}-{engine.kv_heads}kv-{engine.gdn_head_size}{'-skewed' if engine.skew_kv_heads else ''}"
        return tiny_models.make_tiny_model(
            engine.kind,
            self.directory / name,
            num_key_value_heads=engine.kv_heads,
            skew_kv_heads=engine.skew_kv_heads,
            gdn_head_size=engine.gdn_head_size,
        )

    def run(self, engine: Engine, work: Sequence[dict[str, Any]] | None = None) -> Run:
        """The answers of ``engine``.

        Raises:
            AssertionError: with the end of the log, if the engine failed or took too long.
        """
        if engine not in self._runs:
            self._runs[engine] = self._start(engine, list(work or phases(engine)))
        return self._runs[engine]

    def run_side_by_side(self, *engines: Engine) -> list[Run]:
        """The answers of several engines, started together: for machines with cores and memory for all of them."""
        for engine in engines:
            self.model(engine)  # made once, not by several threads
        with ThreadPoolExecutor(len(engines)) as pool:
            return list(pool.map(self.run, engines))

    def _start(self, engine: Engine, work: list[dict[str, Any]]) -> Run:
        code, log, stem = self.attempt(engine, work)
        assert code == 0, f"{engine} ended with {code}:\n{log[-6000:]}"
        return Run(json.loads(stem.with_suffix(".out.json").read_text())["phases"], log)

    def attempt(self, engine: Engine, work: list[dict[str, Any]]) -> tuple[int, str, Path]:
        """Start an engine that may fail: (exit status, log, path of its files without a suffix)."""
        stem = self.directory / f"run{next(self._numbers)}"
        environment = self._environment(engine)
        spec = {
            "model": str(self.model(engine)),
            "environment": {**environment, **dict(engine.environment)},
            "engine": engine.arguments(),
            "phases": work,
        }
        stem.with_suffix(".spec.json").write_text(json.dumps(spec))
        command = [engine.python, str(DRIVER), f"{stem}.spec.json", f"{stem}.out.json"]
        code, log = run_limited(command, stem.with_suffix(".log"), START_AND_RUN_LIMIT_S)
        return code, log, stem

    def _environment(self, engine: Engine) -> dict[str, str]:
        """What the engine's process needs beside its arguments."""
        if engine.python != sys.executable:
            return {}  # that interpreter finds its packages by itself
        here = Path(__file__).parent
        worker_classes = str(here.with_name("gpu") if engine.is_on_gpu else here)
        path = {"PYTHONPATH": os.pathsep.join(filter(None, (worker_classes, os.environ.get("PYTHONPATH"))))}
        if engine.is_on_gpu:
            return path
        environment = tiny_models.cpu_environment(engine.tp) | path
        if engine.dcp > 1:
            # The plugin binds the ranks; only stock needs to be told how.
            del environment["VLLM_CPU_OMP_THREADS_BIND"]
        return environment


def run_limited(
    command: Sequence[str], log_path: Path, limit_s: float, environment: dict[str, str] | None = None
) -> tuple[int, str]:
    """Run a command and everything that it starts, no longer than ``limit_s`` seconds: (exit status, output)."""
    with log_path.open("w") as log:
        process = subprocess.Popen(
            command,
            stdout=log,
            stderr=subprocess.STDOUT,
            stdin=subprocess.DEVNULL,
            start_new_session=True,
            env={**os.environ, **(environment or {})},
        )
        try:
            code = process.wait(timeout=limit_s)
        except subprocess.TimeoutExpired:
            code = 124
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
    return code, log_path.read_text(errors="replace")


def without_dcp(engine: Engine, **changes: Any) -> Engine:
    """The oracle's beginning: the same model and TP with N = 1, no prefix caching and stock's chunks."""
    plain = {"dcp": 1, "interleave": 1, "comm": "ag_rs", "prefix_caching": False, "max_num_batched_tokens": None}
    return replace(engine, **{**plain, **changes})


def everything(run: Run) -> list[dict[str, Any]]:
    """All requests but the prompt of one token that follows others: there stock itself is wrong (GDN, 0.25.1)."""
    return [request for number, phase in enumerate(run.phases) if number != 2 for request in phase]


def answered(ours: Sequence[dict[str, Any]], stocks: Sequence[dict[str, Any]]) -> tuple[list[Any], list[Any]]:
    """Both without the requests that stock answers with NaN.

    Before 0.25 its CPU attention multiplies weights of 0 with what the block's previous owner left behind: the float32
    state of a gated delta net, read as bfloat16.
    """
    pairs = [(our, stock) for our, stock in zip(ours, stocks, strict=True) if not has_nan(stock)]
    return [our for our, _ in pairs], [stock for _, stock in pairs]


def has_nan(request: dict[str, Any]) -> bool:
    """Whether a log-probability of an answer is no number."""
    return any(value != value for value in [*request["prompt_logprobs"], *request["logprobs"]])


@dataclass(frozen=True)
class Difference:
    """Differences in log-probability between two engines' answers to the same requests."""

    mean: float
    largest: float
    num_positions: int


def difference(one: Sequence[dict[str, Any]], other: Sequence[dict[str, Any]]) -> Difference:
    """Compare prompts position by position, and generations up to and including the first greedy difference."""
    gaps: list[float] = []
    for a, b in zip(one, other, strict=True):
        gaps += [abs(x - y) for x, y in zip(a["prompt_logprobs"], b["prompt_logprobs"], strict=True)]
        pairs = zip(a["tokens"], b["tokens"], strict=True)
        common = next((number for number, (x, y) in enumerate(pairs, start=1) if x != y), len(a["tokens"]))
        gaps += [abs(x - y) for x, y in zip(a["logprobs"][:common], b["logprobs"][:common], strict=True)]
    assert gaps
    assert all(gap == gap for gap in gaps), "NaN among the log-probabilities"
    return Difference(sum(gaps) / len(gaps), max(gaps), len(gaps))
