# SPDX-License-Identifier: Apache-2.0
"""One run of `verify`: two servers, one after the other, asked the same."""

from __future__ import annotations

import contextlib
import os
import shlex
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, TypeVar

from rich.console import Console

from vllm_dcp_hybrid.cli.client import RequestFailed
from vllm_dcp_hybrid.cli.demo_report import kv_tokens_in
from vllm_dcp_hybrid.cli.diagnosis import Diagnosis
from vllm_dcp_hybrid.cli.installed import InstalledVLLM
from vllm_dcp_hybrid.cli.server import Server, ServerFailed, free_port
from vllm_dcp_hybrid.cli.session import say, server_environment, wait_until_ready
from vllm_dcp_hybrid.cli.verify import engine
from vllm_dcp_hybrid.cli.verify.asking import (
    Asker,
    DCPAnswers,
    Deadline,
    OracleAnswers,
    ask_dcp,
    ask_oracle,
    ask_other,
)
from vllm_dcp_hybrid.cli.verify.bounds import Row, judge
from vllm_dcp_hybrid.cli.verify.engine import ServeOptions
from vllm_dcp_hybrid.cli.verify.measure import measure, noise_between_sizes
from vllm_dcp_hybrid.cli.verify.model import VerifiedModel
from vllm_dcp_hybrid.cli.verify.recall import RecallPrompt, RecallTask, recall_prompts
from vllm_dcp_hybrid.cli.verify.report import EngineFacts, Findings
from vllm_dcp_hybrid.cli.verify.work import Edges, Work, make_work

_NUM_RECALL_PROMPTS = 48
_VISIBLE_GPUS = "CUDA_VISIBLE_DEVICES"

Answers = TypeVar("Answers")


@dataclass(frozen=True)
class VerifyOptions:
    """What the user asked for.

    Attributes:
        model: a directory or the name of a downloaded model.
        serve: sizes and options of the servers.
        limit_seconds: longest time of one engine, from its start to its last answer.
        noise_tp_size: tensor-parallel size of the engine that measures rounding where there is a doubt, 0 for none.
        at_once: whether both servers run at the same time.
        json_file: where the report goes, None for nowhere.
        keep: directory for the logs; None for one that is deleted unless a server fails.
    """

    model: str
    serve: ServeOptions
    limit_seconds: float = 900.0
    noise_tp_size: int = 0
    at_once: bool = False
    json_file: Path | None = None
    keep: Path | None = None


@dataclass(frozen=True)
class Setting:
    """What was found before any server starts.

    Attributes:
        vllm: the vLLM to serve with.
        model: what is served.
        recall_task: of the model, None for most.
        diagnosis: of this environment and machine.
        max_model_len: longest sequence, tokens.
        chunk: longest piece of a prompt that one step computes, tokens.
    """

    vllm: InstalledVLLM
    model: VerifiedModel
    recall_task: RecallTask | None
    diagnosis: Diagnosis
    max_model_len: int
    chunk: int


class Verification:
    """One run, after all checks.

    Args:
        options: what the user asked for.
        setting: what was found.
        directory: for logs.
        console: to print to.
    """

    def __init__(self, options: VerifyOptions, setting: Setting, directory: Path, console: Console) -> None:
        self.options, self.setting, self.directory, self.console = options, setting, directory, console
        self.recall: list[RecallPrompt] = []
        if setting.recall_task:
            self.recall = recall_prompts(setting.recall_task, _NUM_RECALL_PROMPTS, max_length=setting.max_model_len)
        self._engines: list[EngineFacts] = []
        self._warnings: list[str] = []

    @property
    def facts(self) -> dict[str, Any]:
        """For the report, whatever comes of it."""
        setting = self.setting
        return {
            "model_path": str(setting.model.path),
            "architecture": setting.model.shape.architecture,
            "weights_dtype": setting.model.dtype,
            "vllm": setting.vllm.version,
            "is_cpu_build": setting.vllm.is_cpu_build,
            "gpus": list(setting.diagnosis.machine.gpus),
            "max_model_len": setting.max_model_len,
            "chunk": setting.chunk,
        }

    def run(self) -> Findings:
        """Ask both engines and judge; where that leaves a doubt, ask a third.

        Raises:
            ServerFailed: an engine did not start, died, or took too long.
        """
        serve, dcp_size = self.options.serve, self.options.serve.dcp_size
        self._introduce()
        with contextlib.ExitStack() as running:
            early = running.enter_context(self.server(serve.tp_size, 1)) if self.options.at_once else None
            with self.server(serve.tp_size, dcp_size) as server:
                block, work, ours = self.interview(server, f"the engine with DCP {dcp_size}", self.ask_with_dcp)
                log = server.log.read_text("utf-8", "replace")
            oracle_server = early or running.enter_context(self.server(serve.tp_size, 1))
            oracle = self.interview(
                oracle_server, "the engine without DCP", lambda _, asker: ask_oracle(asker, work, self.recall, ours)
            )
        dtype = engine.dtype_in(log, self.setting.model.dtype)
        measured = measure(work, ours, oracle, self.recall)
        judgement = judge(measured.rows, measured.noise, measured.sensitivity, dtype, measured.recall)
        if judgement.might_be_rounding and self.options.noise_tp_size:
            more_noise = self.noise_of_rounding(self.options.noise_tp_size, work, oracle)
            measured = replace(measured, noise=[*measured.noise, *more_noise])
            judgement = judge(measured.rows, measured.noise, measured.sensitivity, dtype, measured.recall)
        return Findings(
            subject=f"DCP {dcp_size} of {self.options.model} at TP {serve.tp_size}",
            whose=engine.whose_dcp(log),
            effective_block=block,
            dtype=dtype,
            engines=tuple(self._engines),
            measured=measured,
            judgement=judgement,
            prefix_hits=ours.prefix_hits if serve.prefix_caching else None,
            warnings=tuple(self._warnings),
        )

    def noise_of_rounding(self, tp_size: int, work: Work, oracle: OracleAnswers) -> list[Row]:
        """Ask an engine without DCP of another tensor-parallel size; nothing where it cannot run here."""
        say(
            self.console,
            "\nThe answers differ by more than those of the engine without DCP among themselves, and by less than a "
            f"fault would make them. What rounding does is measured with TP {tp_size}.",
        )
        try:
            with self.server(tp_size, 1) as server:
                other = self.interview(
                    server,
                    f"the engine without DCP at TP {tp_size}",
                    lambda _, asker: ask_other(asker, work, oracle),
                )
        except ServerFailed as error:
            first_line = str(error).splitlines()[0]
            say(self.console, str(error), "yellow")
            self._warnings.append(f"TP {tp_size} could not be asked what rounding does: {first_line}")
            return []
        return noise_between_sizes(work, oracle, other)

    def server(self, tp_size: int, dcp_size: int) -> Server:
        """A server that is not started yet."""
        options, setting = self.options, self.setting
        arguments = options.serve.arguments(
            tp_size,
            dcp_size,
            max_model_len=setting.max_model_len,
            chunk=setting.chunk,
            has_plugin=not setting.diagnosis.reasons,
        )
        command = [*setting.vllm.serve_command(str(setting.model.path)), *arguments]
        say(self.console, f"\n$ {shlex.join(engine.shown(command))}", "cyan")
        environment = server_environment(
            os.environ,
            is_cpu=setting.vllm.is_cpu_build,
            tp_size=tp_size,
            dcp_size=dcp_size,
            num_numa_nodes=setting.diagnosis.machine.num_numa_nodes,
            is_tiny_model=False,
        )
        if options.at_once and dcp_size == 1 and not setting.vllm.is_cpu_build:
            environment[_VISIBLE_GPUS] = _second_share(environment.get(_VISIBLE_GPUS), options.serve.tp_size)
        name = f"tp{tp_size}-dcp{dcp_size}.log"
        return Server(command, port=free_port(), log=self.directory / name, environment=environment)

    def interview(self, server: Server, name: str, ask: Callable[[Server, Asker], Answers]) -> Answers:
        """Wait for a server that has been started, and ask it everything.

        Raises:
            ServerFailed: it did not start, died, or took too long; the message holds the end of its log.
        """
        say(self.console, f"{name}:", "bold")
        deadline = Deadline(self.options.limit_seconds)
        try:
            seconds_to_start = wait_until_ready(server, deadline.remaining, self.console)
        except ServerFailed as error:
            raise ServerFailed(f"{name}: {error}") from error
        begin = time.monotonic()
        with self.console.status("asking") as status:

            def show(stage: str) -> None:
                status.update(f"[dim]{stage}")
                say(self.console, f"{time.monotonic() - begin:3.0f} s  {stage}")

            try:
                answers = ask(server, Asker(server.client, str(self.setting.model.path), deadline, show))
            except RequestFailed as error:
                raise ServerFailed(f"{name} did not answer: {error}\n{server.diagnosis()}") from error
        seconds = time.monotonic() - begin
        say(self.console, f"all answers after {seconds:.0f} s")
        kv_tokens = kv_tokens_in(server.log.read_text("utf-8", "replace"))
        command = shlex.join(engine.shown(server.command))
        self._engines.append(EngineFacts(name, command, seconds_to_start, seconds, kv_tokens))
        return answers

    def ask_with_dcp(self, server: Server, asker: Asker) -> tuple[int, Work, DCPAnswers]:
        """The first interview: its engine says how large the blocks are, of which the prompts' lengths follow."""
        serve = self.options.serve
        log = server.log.read_text("utf-8", "replace")
        edges = Edges(
            effective_block=engine.effective_block_in(log, server.client.metrics(), serve.dcp_size),
            chunk=self.setting.chunk,
            max_model_len=self.setting.max_model_len,
            dcp_world_size=serve.dcp_size,
            interleave_size=serve.interleave,
        )
        asker.say(f"one block of the attention layers is {edges.effective_block:,} tokens of a sequence")
        work = make_work(self.setting.model.words, edges)
        answers = ask_dcp(asker, work, self.recall, has_prefix_caching=serve.prefix_caching)
        return edges.effective_block, work, answers

    def _introduce(self) -> None:
        serve, setting = self.options.serve, self.setting
        build = "CPU" if setting.vllm.is_cpu_build else "GPU"
        say(self.console, f"{self.options.model}: {setting.model.shape.architecture}, weights {setting.model.dtype}")
        say(
            self.console,
            f"vLLM {setting.vllm.version} ({build}), TP {serve.tp_size}, DCP {serve.dcp_size} against DCP 1, at most "
            f"{self.options.limit_seconds:.0f} s each",
        )
        if setting.diagnosis.reasons:
            say(self.console, f"The plugin is not in effect here. {' '.join(setting.diagnosis.reasons)}", "yellow")


def _second_share(visible: str | None, tp_size: int) -> str:
    """The GPUs after the first `tp_size`, which are the other engine's."""
    gpus = visible.split(",") if visible else [str(number) for number in range(2 * tp_size)]
    return ",".join(gpus[tp_size:])
