# SPDX-License-Identifier: Apache-2.0
"""The command: checks before anything starts, then the run, the report and the exit status."""

from __future__ import annotations

import os
from typing import Any

from rich.console import Console

from vllm_dcp_hybrid import patching
from vllm_dcp_hybrid.cli.diagnosis import Diagnosis, diagnose
from vllm_dcp_hybrid.cli.installed import INSTALL_HINT
from vllm_dcp_hybrid.cli.model_shape import UnreadableModel
from vllm_dcp_hybrid.cli.server import ServerFailed
from vllm_dcp_hybrid.cli.session import CannotRun, check_machine, say, signals_as_interrupts, working_directory
from vllm_dcp_hybrid.cli.verify import engine
from vllm_dcp_hybrid.cli.verify.bounds import Verdict
from vllm_dcp_hybrid.cli.verify.model import read_model
from vllm_dcp_hybrid.cli.verify.recall import read_recall_task
from vllm_dcp_hybrid.cli.verify.report import document, failure_document, print_findings, write_json
from vllm_dcp_hybrid.cli.verify.verification import Setting, Verification, VerifyOptions

RIGHT, WRONG, COULD_NOT_RUN, UNCLEAR, INTERRUPTED = 0, 1, 2, 3, 130
_STATUS = {Verdict.RIGHT: RIGHT, Verdict.WRONG: WRONG, Verdict.UNCLEAR: UNCLEAR}
# From here on upstream has hybrid DCP on GPUs, plugin or not.
_UPSTREAM_RELEASES = ">=0.26"


def run_verify(options: VerifyOptions, console: Console) -> int:
    """Verify.

    Returns:
        The exit status: 0 right, 1 wrong, 2 it could not be run, 3 it could not be told, 130 interrupted.
    """
    serve, file = options.serve, options.json_file
    if file is not None and not file.parent.is_dir():
        say(console, f"verify: --json {file}: there is no directory {file.parent}.", "red")
        return COULD_NOT_RUN
    facts: dict[str, Any] = {
        "model": options.model,
        "tp_size": serve.tp_size,
        "dcp_size": serve.dcp_size,
        "interleave": serve.interleave,
        "comm_backend": serve.comm_backend,
        "serve_options": list(serve.extra),
    }
    try:
        with signals_as_interrupts(), working_directory(options.keep, "vllm-dcp-hybrid-verify-") as directory:
            verification = Verification(options, prepare(options, diagnose()), directory, console)
            facts |= verification.facts
            findings = verification.run()
        status = _STATUS[findings.judgement.verdict]
        print_findings(findings, console)
        if status and options.keep is None:
            say(console, "Run it again with --keep DIR to keep the engines' logs.")
        report = {**facts, **document(findings, status)}
    except (CannotRun, UnreadableModel, ServerFailed, OSError) as error:
        status, report = COULD_NOT_RUN, failure_document(str(error), COULD_NOT_RUN, facts)
        say(console, f"\nverify: {error}", "red")
    except KeyboardInterrupt:
        sentence = "interrupted, and all servers are stopped."
        status, report = INTERRUPTED, failure_document(sentence, INTERRUPTED, facts)
        say(console, f"\nverify: {sentence}", "red")
    if file is not None:
        write_json(report, file)
    return status


def prepare(options: VerifyOptions, diagnosis: Diagnosis) -> Setting:
    """Check everything that can be checked before a server starts.

    Raises:
        CannotRun: vLLM, the plugin, the sizes, the options or the machine stand in the way.
        UnreadableModel: there is no such model.
    """
    serve, vllm = options.serve, diagnosis.vllm
    if vllm is None:
        raise CannotRun(f"no vLLM is installed. {INSTALL_HINT}")
    serve.check()
    model = read_model(options.model, os.environ)
    if serve.dcp_size < 2:
        raise CannotRun("at DCP 1 there is nothing to verify: give -dcp 2 or more.")
    illegal = model.shape.illegal_because(serve.tp_size, serve.dcp_size)
    if illegal:
        raise CannotRun(illegal)
    if options.noise_tp_size == serve.tp_size:
        raise CannotRun(f"--noise-tp {serve.tp_size} is the size of both engines: give another, or 0 for none.")
    is_upstreams = not vllm.is_cpu_build and patching.is_among(vllm.version, _UPSTREAM_RELEASES)
    if diagnosis.reasons and (vllm.is_cpu_build or (model.shape.is_hybrid and not is_upstreams)):
        reasons = " ".join(diagnosis.reasons)
        raise CannotRun(f"the plugin would not be in effect here, and stock vLLM refuses this. {reasons}")
    check_machine(diagnosis, vllm, serve.tp_size)
    num_gpus = len(diagnosis.machine.gpus)
    if options.at_once and not vllm.is_cpu_build and num_gpus < 2 * serve.tp_size:
        raise CannotRun(
            f"two engines at once need {2 * serve.tp_size} GPUs, of which {num_gpus} are visible: leave --at-once out."
        )
    return Setting(
        vllm=vllm,
        model=model,
        recall_task=read_recall_task(model.path),
        diagnosis=diagnosis,
        max_model_len=serve.number_of("--max-model-len", min(model.max_model_len, engine.DEFAULT_MAX_MODEL_LEN)),
        chunk=serve.number_of("--max-num-batched-tokens", engine.DEFAULT_CHUNK),
    )
