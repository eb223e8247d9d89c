# SPDX-License-Identifier: Apache-2.0
"""The plugin's switches as a user of ``vllm serve`` and of ``LLM`` meets them."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import time
import urllib.request
from dataclasses import replace
from pathlib import Path

import pytest
from engines import Engine, Engines, run_limited, tokens

from vllm_dcp_hybrid import tiny_models

pytestmark = pytest.mark.e2e

HYBRID = Engine("lfm2", tp=2, dcp=2)
# On one core: with two, stock's own answers differ in the last bits from run to run.
ONE_CORE = ("VLLM_CPU_OMP_THREADS_BIND", "0")
LLAMA = Engine("llama", tp=1, kv_heads=2, environment=(ONE_CORE,))
# On a CPU stock gets no further than its attention backend; on a GPU it refuses the mixed block sizes.
STOCK_REFUSAL = "Decode Context Parallelism (DCP) requires attention implementations to return the softmax LSE"


def serve(engine: Engine, model: Path, *flags: str) -> list[str]:
    """`vllm serve`, started so that it also runs where the CPU wheel keeps its command from starting."""
    return [
        *(sys.executable, "-m", "vllm_dcp_hybrid.cli.stock", "serve", str(model)),
        *tiny_models.serve_arguments(engine.kind),
        *("-tp", str(engine.tp), "-dcp", str(engine.dcp), "--enforce-eager", "--max-model-len", "4096"),
        *("--host", "127.0.0.1", *flags),
    ]


@pytest.mark.parametrize("switch", [{"VLLM_PLUGINS": ""}, {"DCP_HYBRID": "0"}], ids=["filtered-out", "kill-switch"])
def test_case_30_without_the_plugin_stock_refuses_in_its_own_words(
    engines: Engines, tmp_path: Path, switch: dict[str, str]
) -> None:
    """CASES 30: nothing half-applied; the kill switch also reaches the processes that this one starts."""
    code, log = run_limited(
        serve(HYBRID, engines.model(HYBRID)),
        tmp_path / "log",
        300,
        {**tiny_models.cpu_environment(HYBRID.tp), **switch},
    )
    assert code not in (0, 124), log[-3000:]
    assert STOCK_REFUSAL in log
    assert "Decode Context Parallelism for a hybrid model" not in log


@pytest.mark.parametrize(
    ("switch", "sentence"),
    [
        ({"DCP_HYBRID": "0"}, "it is not in effect: DCP_HYBRID=0 is set in the environment"),
        ({"VLLM_PLUGINS": ""}, "unrecognized arguments: --enable-plugin"),
    ],
    ids=["kill-switch", "filtered-out"],
)
def test_a_demand_stops_the_server_before_the_weights_load(
    engines: Engines, tmp_path: Path, switch: dict[str, str], sentence: str
) -> None:
    code, log = run_limited(
        serve(HYBRID, engines.model(HYBRID), "--enable-plugin", "dcp_hybrid"), tmp_path / "log", 120, switch
    )
    assert code not in (0, 124), log[-3000:]
    assert sentence in log
    assert "Loading weights" not in log


def test_an_illegal_size_is_refused_before_the_weights_load(engines: Engines, tmp_path: Path) -> None:
    """CASES 7: two KV heads at TP 2 leave nothing to split."""
    two_heads = replace(HYBRID, kv_heads=2)
    code, log = run_limited(serve(two_heads, engines.model(two_heads)), tmp_path / "log", 120)
    assert code not in (0, 124), log[-3000:]
    assert "The largest legal size here is 1" in log
    assert "Loading weights" not in log


def test_case_29_installed_and_idle_changes_no_answer(engines: Engines) -> None:
    """CASES 29: a plain model, with the plugin and without it, answers equally to the last bit."""
    work = [{"prompts": [tokens(length) for length in (1, 90, 700)], "max_tokens": 16, "score_prompt": True}]
    with_plugin = engines.run(LLAMA, work)
    without = engines.run(replace(LLAMA, environment=(ONE_CORE, ("VLLM_PLUGINS", ""))), work)
    assert with_plugin.phases == without.phases
    assert "fingerprint" not in with_plugin.log


def test_the_server_answers_over_http_with_the_flag(engines: Engines, tmp_path: Path) -> None:
    """CASES 27: `vllm serve ... --enable-plugin dcp_hybrid`, without OMP settings, streaming, several at once."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    environment = tiny_models.cpu_environment(HYBRID.tp)
    del environment["VLLM_CPU_OMP_THREADS_BIND"]
    model = engines.model(HYBRID)
    with (tmp_path / "log").open("w") as log:
        server = subprocess.Popen(
            serve(HYBRID, model, "--port", str(port), "--enable-plugin", "dcp_hybrid"),
            stdout=log,
            stderr=subprocess.STDOUT,
            start_new_session=True,
            env={**os.environ, **environment},
        )
    try:
        wait_until_healthy(server, port, tmp_path / "log")
        whole = complete(port, model, {"max_tokens": 12})
        streamed = complete(port, model, {"max_tokens": 12, "stream": True})
        assert len(whole) == 1
        assert "".join(streamed) == whole[0]
    finally:
        os.killpg(server.pid, 9)
        server.wait()


def wait_until_healthy(server: subprocess.Popen, port: int, log: Path, limit_s: float = 240) -> None:
    """Return once the server answers; fail with its log where it does not."""
    deadline = time.monotonic() + limit_s
    while time.monotonic() < deadline and server.poll() is None:
        try:
            with urllib.request.urlopen(f"http://127.0.0.1:{port}/health", timeout=5):
                return
        except OSError:
            time.sleep(1)
    pytest.fail(f"the server did not come up:\n{log.read_text(errors='replace')[-4000:]}")


def complete(port: int, model: Path, options: dict) -> list[str]:
    """The text of one completion: in one piece, or as it was streamed."""
    body = {"model": str(model), "prompt": tokens(300), "temperature": 0, "ignore_eos": True, **options}
    request = urllib.request.Request(
        f"http://127.0.0.1:{port}/v1/completions",
        data=json.dumps(body).encode(),
        headers={"Content-Type": "application/json"},
    )
    with urllib.request.urlopen(request, timeout=120) as response:
        if not options.get("stream"):
            return [json.load(response)["choices"][0]["text"]]
        events = [line[6:] for line in response.read().decode().splitlines() if line.startswith("data: {")]
    return [json.loads(event)["choices"][0]["text"] for event in events]
