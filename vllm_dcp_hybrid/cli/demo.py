# SPDX-License-Identifier: Apache-2.0
"""`demo`: serve tiny hybrid models with DCP on this machine, ask, and compare with the same server without DCP."""

from __future__ import annotations

import contextlib
import json
import os
import random
import shlex
import signal
import tempfile
import time
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from types import FrameType
from typing import Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

from vllm_dcp_hybrid import activation, tiny_models
from vllm_dcp_hybrid.cli import compare
from vllm_dcp_hybrid.cli.client import Client, RequestFailed, metric_label, metric_total
from vllm_dcp_hybrid.cli.compare import BOUNDS, Agreement, Generation
from vllm_dcp_hybrid.cli.diagnosis import Diagnosis, diagnose
from vllm_dcp_hybrid.cli.installed import INSTALL_HINT, InstalledVLLM
from vllm_dcp_hybrid.cli.model_shape import read_model_shape
from vllm_dcp_hybrid.cli.server import Server, ServerFailed, free_port

AGREE, DISAGREE, COULD_NOT_RUN, INTERRUPTED = 0, 1, 2, 130

START_LIMIT_SECONDS = 300.0
NUM_QUERY_HEADS = 8
MAX_MODEL_LEN = 4096
# One rank with nothing, one token either side of a block, and several blocks on each rank.
PROMPT_LENGTHS = (2, 17, 129, 300, 700, 1403)
NUM_GENERATED = 32
_TOP = 5
_STREAMED_PROMPT = "Once upon a time, tokens lived on two ranks:"
_NUM_STREAMED = 48


@dataclass(frozen=True)
class DemoOptions:
    """What the user asked for.

    Attributes:
        kinds: keys of `TINY_MODELS`, hybrid ones.
        tp_size: tensor-parallel size of all servers.
        dcp_size: DCP size of the server that is shown.
        interleave: consecutive tokens of one rank.
        comm_backend: how the ranks exchange results.
        prefix_caching: whether the servers cache prefixes and every prompt is sent twice.
        dtype: of the weights; None for what each kind can do best.
        keep: directory for models, logs and results; None for one that is deleted.
        port: of the servers, None for any free one.
    """

    kinds: tuple[str, ...]
    tp_size: int
    dcp_size: int
    interleave: int
    comm_backend: str
    prefix_caching: bool
    dtype: str | None
    keep: Path | None
    port: int | None


@dataclass(frozen=True)
class ServerRun:
    """What one server did.

    Attributes:
        dcp_size: its DCP size.
        seconds_to_start: until it answered.
        first: the answers to the prompts.
        again: the answers to the same prompts once more, None without prefix caching.
        prefix_hits: tokens of the second time that were in the cache.
        kv_tokens: tokens that vLLM says fit into its KV cache, None where it does not say.
        bytes_per_token: of sharded KV, per rank.
    """

    dcp_size: int
    seconds_to_start: float
    first: tuple[Generation, ...]
    again: tuple[Generation, ...] | None
    prefix_hits: int
    kv_tokens: int | None
    bytes_per_token: float | None


class CannotRun(RuntimeError):
    """Why there is nothing to show on this machine, in one sentence."""


def run_demo(options: DemoOptions, console: Console) -> int:
    """Show it.

    Returns:
        The exit status: 0 DCP agrees with no DCP, 1 it does not, 2 it could not be run, 130 interrupted.
    """
    try:
        with _signals_as_interrupts(), _working_directory(options.keep) as directory:
            vllm = check_prerequisites(options, diagnose())
            _say(console, _headline(options, vllm), "bold")
            verdicts = [_show_kind(kind, options, vllm, directory, console) for kind in options.kinds]
            if options.keep:
                _say(console, f"\nModels, logs and results are in {directory}.")
    except (CannotRun, ServerFailed, RequestFailed, OSError) as error:
        _say(console, f"\ndemo: {error}", "red")
        return COULD_NOT_RUN
    except KeyboardInterrupt:
        _say(console, "\ndemo: interrupted; the server is stopped.", "red")
        return INTERRUPTED
    return AGREE if all(verdicts) else DISAGREE


def check_prerequisites(options: DemoOptions, diagnosis: Diagnosis) -> InstalledVLLM:
    """The vLLM to use.

    Raises:
        CannotRun: vLLM, the plugin, the sizes or the machine stand in the way.
    """
    vllm, machine = diagnosis.vllm, diagnosis.machine
    if vllm is None:
        raise CannotRun(f"no vLLM is installed. {INSTALL_HINT}")
    if diagnosis.reasons:
        raise CannotRun("the plugin would not be in effect here. " + " ".join(diagnosis.reasons))
    if not vllm.is_cpu_build and len(machine.gpus) < options.tp_size:
        raise CannotRun(
            f"this vLLM is a GPU build, and TP {options.tp_size} needs {options.tp_size} GPUs where {len(machine.gpus)} "
            "are visible. For a demo on the CPU, install the CPU build in another environment: "
            "`uv pip install 'vllm-dcp-hybrid[cpu]'`."
        )
    if options.tp_size % options.dcp_size:
        raise CannotRun(f"DCP {options.dcp_size} is not possible: it must divide TP {options.tp_size}.")
    if options.dcp_size < 2:
        raise CannotRun("there is nothing to compare at DCP 1: give -dcp 2 or more.")
    if NUM_QUERY_HEADS % options.tp_size:
        raise CannotRun(f"TP {options.tp_size} does not divide the tiny models' {NUM_QUERY_HEADS} query heads.")
    problem = machine.shared_memory_problem(options.tp_size)
    if problem:
        raise CannotRun(problem)
    return vllm


def server_arguments(kind: str, dtype: str, dcp_size: int, options: DemoOptions) -> list[str]:
    """The flags that follow the model on the server's command line."""
    flags = tiny_models.serve_arguments(kind)
    flags[flags.index("--dtype") + 1] = dtype
    flags += ["-tp", str(options.tp_size)]
    if dcp_size > 1:
        flags += ["-dcp", str(dcp_size), "--enable-plugin", activation.PLUGIN_NAME]
        if options.interleave != 1:
            flags += ["--cp-kv-cache-interleave-size", str(options.interleave)]
        if options.comm_backend != "ag_rs":
            flags += ["--dcp-comm-backend", options.comm_backend]
    caching = "--enable-prefix-caching" if options.prefix_caching else "--no-enable-prefix-caching"
    return [*flags, caching, "--max-model-len", str(MAX_MODEL_LEN), "--enforce-eager"]


def server_environment(
    vllm: InstalledVLLM, tp_size: int, dcp_size: int, num_numa_nodes: int, base: Mapping[str, str]
) -> dict[str, str]:
    """The environment of a server; what the user has set stays."""
    extra = {"HF_HUB_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1"}
    if vllm.is_cpu_build:
        extra |= tiny_models.cpu_environment(tp_size)
        # With DCP the plugin divides the cores; stock alone stops where there are fewer NUMA nodes than ranks.
        if dcp_size > 1 or num_numa_nodes >= tp_size:
            del extra["VLLM_CPU_OMP_THREADS_BIND"]
    return {**extra, **base}


def _show_kind(kind: str, options: DemoOptions, vllm: InstalledVLLM, directory: Path, console: Console) -> bool:
    """Run one model with and without DCP and print how they compare.

    Returns:
        Whether they agree.
    """
    dtype = options.dtype or ("float32" if kind == "lfm2" and vllm.is_cpu_build else "bfloat16")
    num_kv_heads = options.tp_size // options.dcp_size
    _say(console, f"\n{tiny_models.TINY_MODELS[kind]}", "bold")
    with console.status("making a checkpoint with random weights"):
        model = tiny_models.make_tiny_model(
            kind,
            directory / f"{kind}-{dtype}-kv{num_kv_heads}",
            num_attention_heads=NUM_QUERY_HEADS,
            num_key_value_heads=num_kv_heads,
            dtype=dtype,
        )
    runs = [_run_server(kind, model, dtype, size, options, vllm, console) for size in (options.dcp_size, 1)]
    agreements = [compare.compare(*pair) for pair in zip(runs[0].first, runs[1].first, strict=True)]
    again = [compare.compare(*pair) for pair in zip(runs[0].again or (), runs[1].again or (), strict=True)]
    console.print()
    console.print(agreement_table(agreements, runs[0].dcp_size))
    console.print()
    console.print(memory_table(runs))
    is_good = _print_verdict(agreements, again, dtype, console)
    if options.keep:
        results = {"kind": kind, "dtype": dtype, "agree": is_good, "runs": [asdict(run) for run in runs]}
        (directory / f"{model.name}.results.json").write_text(json.dumps(results, indent=1) + "\n")
    return is_good


def _run_server(
    kind: str, model: Path, dtype: str, dcp_size: int, options: DemoOptions, vllm: InstalledVLLM, console: Console
) -> ServerRun:
    """Start a server, send the requests, stop it."""
    command = [*vllm.serve_command(str(model)), *server_arguments(kind, dtype, dcp_size, options)]
    numa_nodes = diagnose_numa_nodes()
    environment = server_environment(vllm, options.tp_size, dcp_size, numa_nodes, os.environ)
    log = model.with_name(f"{model.name}.dcp{dcp_size}.log")
    _say(console, f"$ {shlex.join(['python', *command[1:]])}", "dim")
    with Server(command, port=options.port or free_port(), log=log, environment=environment) as server:
        with console.status("starting") as status:

            def show(seconds: float, line: str) -> None:
                width = max(20, console.width - 12)
                status.update(Text(f"{seconds:3.0f} s  {line}"[:width], "dim"))

            seconds = server.wait_until_ready(START_LIMIT_SECONDS, show)
        _say(console, f"  DCP {dcp_size}: ready after {seconds:.0f} s")
        try:
            return _ask(server.client, str(model), dcp_size, seconds, options, console, model)
        except RequestFailed as error:
            raise ServerFailed(f"a request failed: {error}\n{server.diagnosis()}") from error


def _ask(
    client: Client,
    name: str,
    dcp_size: int,
    seconds_to_start: float,
    options: DemoOptions,
    console: Console,
    model: Path,
) -> ServerRun:
    if dcp_size > 1:
        _show_stream(client, name, console)
    prompts = random_prompts()
    with console.status(f"asking {len(prompts)} unequal prompts in one batch"):
        started = time.monotonic()
        first = _complete(client, name, prompts, has_prompt_logprobs=True)
        before = metric_total(client.metrics(), "vllm:prefix_cache_hits")
        again = _complete(client, name, prompts, has_prompt_logprobs=False) if options.prefix_caching else None
        elapsed = time.monotonic() - started
    metrics = client.metrics()
    times = "twice" if again else "once"
    _say(console, f"  DCP {dcp_size}: {len(prompts)} prompts in one batch, {times}, in {elapsed:.1f} s")
    kv_tokens = metric_label(metrics, "vllm:cache_config_info", "kv_cache_size_tokens")
    return ServerRun(
        dcp_size=dcp_size,
        seconds_to_start=seconds_to_start,
        first=first,
        again=again,
        prefix_hits=int(metric_total(metrics, "vllm:prefix_cache_hits") - before),
        kv_tokens=int(kv_tokens) if kv_tokens and kv_tokens.isdigit() else None,
        bytes_per_token=read_model_shape(model).attention_bytes_per_token(options.tp_size, dcp_size),
    )
