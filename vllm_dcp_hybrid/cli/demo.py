# SPDX-License-Identifier: Apache-2.0
"""`demo`: serve tiny hybrid models with DCP on this machine, ask, and compare with the same server without DCP."""

from __future__ import annotations

import json
import os
import shlex
import time
from dataclasses import asdict, dataclass
from pathlib import Path

from rich.console import Console

from vllm_dcp_hybrid import activation, tiny_models
from vllm_dcp_hybrid.cli import questions
from vllm_dcp_hybrid.cli.client import Client, RequestFailed, metric_total
from vllm_dcp_hybrid.cli.compare import BOUNDS
from vllm_dcp_hybrid.cli.demo_report import ServerRun, bytes_per_token_in, kv_tokens_in, print_report
from vllm_dcp_hybrid.cli.diagnosis import Diagnosis, diagnose
from vllm_dcp_hybrid.cli.installed import INSTALL_HINT, InstalledVLLM
from vllm_dcp_hybrid.cli.model_shape import read_model_shape
from vllm_dcp_hybrid.cli.server import Server, ServerFailed, free_port
from vllm_dcp_hybrid.cli.session import (
    CannotRun,
    check_machine,
    say,
    server_environment,
    signals_as_interrupts,
    wait_until_ready,
    working_directory,
)

AGREE, DISAGREE, COULD_NOT_RUN, INTERRUPTED = 0, 1, 2, 130

START_LIMIT_SECONDS = 300.0
MAX_MODEL_LEN = 4096
NUM_QUERY_HEADS = 8
_MAX_TP_SIZE = 4  # the tiny gated delta nets have 4 key heads
_PREFIX_HITS = "vllm:prefix_cache_hits"


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
        dtype: of the weights; None for what suits each kind.
        keep: directory for models, logs and results; None for one that is deleted.
        port: of the servers, None for any free one.
    """

    kinds: tuple[str, ...]
    tp_size: int = 2
    dcp_size: int = 2
    interleave: int = 1
    comm_backend: str = "ag_rs"
    prefix_caching: bool = True
    dtype: str | None = None
    keep: Path | None = None
    port: int | None = None

    @property
    def num_kv_heads(self) -> int:
        """As few as make the DCP size legal."""
        return max(1, self.tp_size // self.dcp_size)

    def dtype_of(self, kind: str, *, is_cpu: bool) -> str:
        """Of the weights: the more exact one where the kernels have it."""
        return self.dtype or ("float32" if is_cpu and kind == "lfm2" else "bfloat16")


def run_demo(options: DemoOptions, console: Console) -> int:
    """Show it.

    Returns:
        The exit status: 0 DCP agrees with no DCP, 1 it does not, 2 it could not be run, 130 interrupted.
    """
    try:
        with signals_as_interrupts(), working_directory(options.keep, "vllm-dcp-hybrid-demo-") as directory:
            diagnosis = diagnose()
            vllm = check_prerequisites(options, diagnosis)
            demo = Demo(options, vllm, diagnosis.machine.num_numa_nodes, directory, console)
            return AGREE if demo.run() else DISAGREE
    except (CannotRun, ServerFailed, OSError) as error:
        say(console, f"\ndemo: {error}", "red")
        return COULD_NOT_RUN
    except KeyboardInterrupt:
        say(console, "\ndemo: interrupted, and the server is stopped.", "red")
        return INTERRUPTED


def check_prerequisites(options: DemoOptions, diagnosis: Diagnosis) -> InstalledVLLM:
    """The vLLM to use.

    Raises:
        CannotRun: vLLM, the plugin, the sizes or the machine stand in the way.
    """
    vllm = diagnosis.vllm
    tp_size, dcp_size = options.tp_size, options.dcp_size
    if vllm is None:
        raise CannotRun(f"no vLLM is installed. {INSTALL_HINT}")
    if diagnosis.reasons:
        raise CannotRun(f"the plugin would not be in effect here. {' '.join(diagnosis.reasons)}")
    if dcp_size < 2:
        raise CannotRun("at DCP 1 there is nothing to show: give -dcp 2 or more.")
    if tp_size % dcp_size:
        raise CannotRun(f"DCP {dcp_size} is not possible at TP {tp_size}: it must divide it.")
    if tp_size > _MAX_TP_SIZE or NUM_QUERY_HEADS % tp_size:
        raise CannotRun(f"TP {tp_size} is not possible for the tiny models: give -tp 2 or -tp 4.")
    check_machine(diagnosis, vllm, tp_size)
    return vllm


class Demo:
    """The show, one model after the other.

    Args:
        options: what the user asked for.
        vllm: the vLLM to serve with.
        num_numa_nodes: of this machine.
        directory: for models, logs and results.
        console: to print to.
    """

    def __init__(
        self, options: DemoOptions, vllm: InstalledVLLM, num_numa_nodes: int, directory: Path, console: Console
    ) -> None:
        self.options = options
        self.vllm = vllm
        self.num_numa_nodes = num_numa_nodes
        self.directory = directory
        self.console = console

    def run(self) -> bool:
        """Whether all models agree."""
        options = self.options
        build = "CPU" if self.vllm.is_cpu_build else "GPU"
        caching = "on" if options.prefix_caching else "off"
        say(
            self.console,
            f"vLLM {self.vllm.version} ({build}), TP {options.tp_size}, DCP {options.dcp_size}, "
            f"interleave {options.interleave}, {options.comm_backend}, prefix caching {caching}",
        )
        verdicts = [self.show(kind) for kind in options.kinds]
        if options.keep:
            say(self.console, f"\nModels, logs and results are in {self.directory}.")
        return all(verdicts)

    def show(self, kind: str) -> bool:
        """Run one model with DCP and without; whether the two agree."""
        options = self.options
        dtype = options.dtype_of(kind, is_cpu=self.vllm.is_cpu_build)
        say(self.console, f"\n{tiny_models.TINY_MODELS[kind]}", "bold")
        with self.console.status("making a checkpoint"):
            model = tiny_models.make_tiny_model(
                kind,
                self.directory / f"{kind}-{dtype}-kv{options.num_kv_heads}",
                num_attention_heads=NUM_QUERY_HEADS,
                num_key_value_heads=options.num_kv_heads,
                dtype=dtype,
            )
        heads = f"{options.num_kv_heads} KV head{'s' if options.num_kv_heads > 1 else ''}"
        say(self.console, f"random weights, {dtype}, {NUM_QUERY_HEADS} query heads, {heads}")
        runs = self.serve(kind, model, dtype, options.dcp_size), self.serve(kind, model, dtype, 1)
        is_good = print_report(runs, BOUNDS["float32" if dtype == "float32" else "bfloat16"], self.console)
        if options.keep:
            results = {"kind": kind, "dtype": dtype, "agree": is_good, "runs": [asdict(run) for run in runs]}
            (self.directory / f"{model.name}.results.json").write_text(json.dumps(results, indent=1) + "\n")
        elif not is_good:
            say(self.console, "Run it again with --keep DIR to keep the models, the logs and all numbers.")
        return is_good

    def serve(self, kind: str, model: Path, dtype: str, dcp_size: int) -> ServerRun:
        """Start a server, ask it everything, stop it.

        Raises:
            ServerFailed: it did not start, or did not answer.
        """
        command = [*self.vllm.serve_command(str(model)), *server_arguments(kind, dtype, dcp_size, self.options)]
        environment = server_environment(
            os.environ,
            is_cpu=self.vllm.is_cpu_build,
            tp_size=self.options.tp_size,
            dcp_size=dcp_size,
            num_numa_nodes=self.num_numa_nodes,
        )
        log = model.with_name(f"{model.name}.dcp{dcp_size}.log")
        say(self.console, f"\n$ {shlex.join(['python', *command[1:]])}", "cyan")
        with Server(command, port=self.options.port or free_port(), log=log, environment=environment) as server:
            seconds = wait_until_ready(server, START_LIMIT_SECONDS, self.console)
            try:
                if dcp_size > 1:
                    self.show_stream(server.client, str(model))
                return self.ask(server.client, model, dcp_size, seconds, log)
            except RequestFailed as error:
                raise ServerFailed(f"a request failed: {error}\n{server.diagnosis()}") from error

    def show_stream(self, client: Client, model: str) -> None:
        """Print one completion while it arrives."""
        say(self.console, "one completion, streamed (random weights write random letters):")
        self.console.print(questions.STREAMED_PROMPT, end=" ", style="dim", highlight=False)
        for piece in questions.stream(client, model):
            self.console.print(piece, end="", markup=False, highlight=False, soft_wrap=True)
        self.console.print()

    def ask(self, client: Client, model: Path, dcp_size: int, seconds_to_start: float, log: Path) -> ServerRun:
        """Send the batch, with prefix caching a second time."""
        prompts = questions.random_prompts()
        started = time.monotonic()
        again, hits = None, 0.0
        with self.console.status(f"asking {len(prompts)} prompts in one batch"):
            first = questions.complete(client, str(model), prompts, has_prompt_logprobs=True)
            if self.options.prefix_caching:
                before = metric_total(client.metrics(), _PREFIX_HITS)
                again = questions.complete(client, str(model), prompts, has_prompt_logprobs=False)
                hits = metric_total(client.metrics(), _PREFIX_HITS) - before
        elapsed = time.monotonic() - started
        times = "twice" if again else "once"
        say(self.console, f"{len(prompts)} unequal prompts in one batch, {times}: {elapsed:.1f} s")
        text = log.read_text("utf-8", "replace")
        computed = read_model_shape(model).attention_bytes_per_token(self.options.tp_size, dcp_size)
        return ServerRun(
            dcp_size=dcp_size,
            seconds_to_start=seconds_to_start,
            first=first,
            again=again,
            prefix_hits=int(hits),
            kv_tokens=kv_tokens_in(text),
            bytes_per_token=bytes_per_token_in(text) or computed,
        )


def server_arguments(kind: str, dtype: str, dcp_size: int, options: DemoOptions) -> list[str]:
    """The flags that follow the model on a server's command line."""
    flags = tiny_models.serve_arguments(kind)
    flags[flags.index("--dtype") + 1] = dtype
    flags += ["-tp", str(options.tp_size)]
    if dcp_size > 1:
        flags += ["-dcp", str(dcp_size), "--enable-plugin", activation.PLUGIN_NAME]
        flags += ["--cp-kv-cache-interleave-size", str(options.interleave)] if options.interleave != 1 else []
        flags += ["--dcp-comm-backend", options.comm_backend] if options.comm_backend != "ag_rs" else []
    caching = "--enable-prefix-caching" if options.prefix_caching else "--no-enable-prefix-caching"
    return [*flags, caching, "--max-model-len", str(MAX_MODEL_LEN), "--enforce-eager"]
