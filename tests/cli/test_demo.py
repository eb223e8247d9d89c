# SPDX-License-Identifier: Apache-2.0
"""`demo`: refusals, what it starts, verdicts; at the end the real one."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from vllm_dcp_hybrid import tiny_models
from vllm_dcp_hybrid.cli import diagnosis
from vllm_dcp_hybrid.cli.demo import DemoOptions, server_arguments
from vllm_dcp_hybrid.cli.installed import InstalledVLLM
from vllm_dcp_hybrid.cli.machine import MIB, Machine
from vllm_dcp_hybrid.cli.session import server_environment
from vllm_dcp_hybrid.tiny_models.architectures import TinyModel

FAKE_SERVER = str(Path(__file__).with_name("fake_server.py"))
ROOMY = Machine(num_cores=2, num_numa_nodes=1, shm_total=64 * MIB, shm_free=64 * MIB, gpus=())


@pytest.fixture
def fake_demo(recorded_vllm: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """Let `demo` find a vLLM, a roomy machine and a server that needs no model; flags steer that server."""

    def make(*flags: str, machine: Machine = ROOMY) -> None:
        def command(self: InstalledVLLM, model: str) -> list[str]:
            return [sys.executable, FAKE_SERVER, *flags]

        def checkpoint(kind: str, path: Path, **sizes: int) -> Path:
            path.mkdir()
            (path / "config.json").write_text(json.dumps(TinyModel(kind=kind, **sizes).config()))
            return path

        monkeypatch.setattr(InstalledVLLM, "serve_command", command)
        monkeypatch.setattr(tiny_models, "make_tiny_model", checkpoint)
        monkeypatch.setattr(diagnosis, "this_machine", lambda: machine)

    return make


def test_no_vllm_is_status_2_and_says_how_to_install_one(run: Callable, no_vllm: None) -> None:
    outcome = run("demo")
    assert outcome.status == 2
    assert "uv run --extra cpu" in outcome.text


def test_plugin_that_would_not_be_in_effect_is_status_2(
    run: Callable, recorded_vllm: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("DCP_HYBRID", "0")
    outcome = run("demo")
    assert outcome.status == 2
    assert "kill switch" in outcome.text


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (["-dcp", "1"], "nothing to show"),
        (["-tp", "4", "-dcp", "3"], "must divide"),
        (["-tp", "8", "-dcp", "2"], "-tp 4"),
    ],
)
def test_sizes_that_are_impossible_are_status_2(
    run: Callable, fake_demo: Callable, arguments: list[str], sentence: str
) -> None:
    fake_demo()
    outcome = run("demo", *arguments)
    assert outcome.status == 2
    assert sentence in outcome.text


def test_little_shared_memory_is_status_2_with_the_remedy(run: Callable, fake_demo: Callable) -> None:
    fake_demo(machine=replace(ROOMY, shm_free=8 * MIB))
    outcome = run("demo")
    assert outcome.status == 2
    assert "/dev/shm has 8 MiB free of 64, and an engine of 2 ranks needs 40" in outcome.text
    assert "--shm-size" in outcome.text


def test_gpu_build_without_gpus_is_status_2(
    run: Callable, fake_demo: Callable, recorded_vllm: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fake_demo()
    monkeypatch.setattr("vllm_dcp_hybrid.cli.installed.metadata.version", lambda name: "9.9.9")
    outcome = run("demo")
    assert outcome.status == 2
    assert "needs 2 GPUs, of which 0 are visible" in outcome.text


def test_agreement_is_status_0(run: Callable, fake_demo: Callable, tmp_path: Path) -> None:
    fake_demo()
    keep = tmp_path / "kept"
    outcome = run("demo", "--model-kind", "lfm2", "--model-kind", "qwen3-next", "--keep", str(keep))
    assert outcome.status == 0, outcome.raw
    assert outcome.text.count("AGREE: over") == 2
    assert "Once upon a time, tokens lived on two ranks: hello·" in outcome.text
    assert "1,403 tokens, again" in outcome.text
    assert "DCP 2 │ 256 │ 1,234 │ 64 of 2,551" in outcome.text
    assert {path.name for path in keep.glob("*.log")} == {
        f"{kind}-kv1.dcp{size}.log" for kind in ("lfm2-float32", "qwen3-next-bfloat16") for size in (1, 2)
    }
    results = json.loads((keep / "lfm2-float32-kv1.results.json").read_text())
    assert results["agree"] is True
    assert [run["dcp_size"] for run in results["runs"]] == [2, 1]


@pytest.mark.parametrize(
    ("kind", "shift", "status"), [("qwen3-next", 0.05, 0), ("lfm2", 0.05, 1), ("qwen3-next", 0.2, 1)]
)
def test_each_dtype_has_its_bound(
    run: Callable,
    fake_demo: Callable,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    kind: str,
    shift: float,
    status: int,
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    fake_demo("--shift", str(shift))
    outcome = run("demo", "--model-kind", kind, "--no-prefix-caching")
    assert outcome.status == status
    assert ("DISAGREE" in outcome.text) == (status == 1)
    assert not list(tmp_path.glob("vllm-dcp-hybrid-demo-*"))
    assert "off" in outcome.text


def test_server_that_does_not_start_is_status_2_with_its_cause_and_log(
    run: Callable, fake_demo: Callable, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    fake_demo("--fail", "vllm_dcp_hybrid.errors.IllegalWorldSize: not like this")
    outcome = run("demo")
    assert outcome.status == 2
    assert "Cause: vllm_dcp_hybrid.errors.IllegalWorldSize: not like this" in outcome.text
    assert len(list(tmp_path.glob("vllm-dcp-hybrid-demo-*/*.log"))) == 1


def test_server_that_refuses_is_status_2(run: Callable, fake_demo: Callable) -> None:
    fake_demo("--refuse")
    outcome = run("demo")
    assert outcome.status == 2
    assert "status 500: no thank you" in outcome.text


def test_only_the_server_with_dcp_demands_the_plugin() -> None:
    options = DemoOptions(kinds=("lfm2",), interleave=16, comm_backend="a2a")
    with_dcp, without = (server_arguments("lfm2", "float32", size, options) for size in (2, 1))
    for flag in ("-dcp", "--enable-plugin", "--cp-kv-cache-interleave-size", "--dcp-comm-backend"):
        assert flag in with_dcp
        assert flag not in without
    assert with_dcp[with_dcp.index("--dtype") + 1] == "float32"
    assert with_dcp.count("--dtype") == 1


def test_only_the_stock_server_is_told_its_cores() -> None:
    def environment(dcp_size: int, num_numa_nodes: int = 1, **base: str) -> dict[str, str]:
        return server_environment(base, is_cpu=True, tp_size=2, dcp_size=dcp_size, num_numa_nodes=num_numa_nodes)

    name = "VLLM_CPU_OMP_THREADS_BIND"
    assert "|" in environment(1)[name]
    assert name not in environment(2)
    assert name not in environment(1, num_numa_nodes=2)
    assert environment(1, **{name: "0-3|4-7"})[name] == "0-3|4-7"


def test_gpu_servers_get_no_cpu_settings() -> None:
    environment = server_environment({}, is_cpu=False, tp_size=2, dcp_size=1, num_numa_nodes=1)
    assert not any(name.startswith("VLLM_CPU") for name in environment)


def test_terminated_demo_leaves_no_server(tmp_path: Path) -> None:
    """SIGTERM while it waits for a server that never gets ready."""
    script = f"""
import sys
from pathlib import Path
from rich.console import Console
from vllm_dcp_hybrid import tiny_models
from vllm_dcp_hybrid.cli import demo
from vllm_dcp_hybrid.cli.installed import InstalledVLLM

InstalledVLLM.serve_command = lambda self, model: [sys.executable, {FAKE_SERVER!r}, "--never-ready"]
tiny_models.make_tiny_model = lambda kind, path, **sizes: path
demo.check_prerequisites = lambda options, diagnosis: InstalledVLLM("9.9.9", Path(), "vllm", True)
sys.exit(demo.run_demo(demo.DemoOptions(kinds=("lfm2",), keep=Path({str(tmp_path)!r})), Console()))
"""
    process = subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE, text=True)
    log = tmp_path / "lfm2-float32-kv1.dcp2.log"
    deadline = time.monotonic() + 30
    while not (log.is_file() and "KV cache size" in log.read_text()) and time.monotonic() < deadline:
        time.sleep(0.1)
    children = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()
    process.send_signal(signal.SIGTERM)
    output, _ = process.communicate(timeout=30)
    assert process.returncode == 130
    assert "interrupted" in output
    assert children
    assert not any(Path(f"/proc/{child}").exists() for child in children)


@pytest.mark.e2e
@pytest.mark.timeout(700)
def test_demo_of_a_real_model_agrees(tmp_path: Path) -> None:
    command = [
        sys.executable,
        "-m",
        "vllm_dcp_hybrid.cli.main",
        "demo",
        "--model-kind",
        "lfm2",
        "--keep",
        str(tmp_path),
    ]
    environment = {**os.environ, "COLUMNS": "80"}
    done = subprocess.run(command, capture_output=True, text=True, timeout=660, check=False, env=environment)
    assert done.returncode == 0, done.stdout + done.stderr
    text = " ".join(done.stdout.split())
    assert "AGREE: over" in text
    assert "all 32" in text
    results = json.loads((tmp_path / "lfm2-float32-kv1.results.json").read_text())
    with_dcp, without = results["runs"]
    assert with_dcp["bytes_per_token"] * 2 == without["bytes_per_token"]
    assert with_dcp["kv_tokens"] > without["kv_tokens"]
    assert with_dcp["prefix_hits"] > 0
