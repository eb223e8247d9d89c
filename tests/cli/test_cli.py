# SPDX-License-Identifier: Apache-2.0
"""The command as a whole."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable

import pytest

from vllm_dcp_hybrid import __version__
from vllm_dcp_hybrid.cli.main import HYBRID_KINDS

HEAVY = {"torch", "vllm", "transformers", "tokenizers"}


def test_version_is_the_packages(run: Callable) -> None:
    outcome = run("--version")
    assert (outcome.status, outcome.text) == (0, f"vllm-dcp-hybrid {__version__}")


@pytest.mark.parametrize("command", ["doctor", "record", "demo", "verify"])
def test_help_documents_the_exit_statuses(run: Callable, command: str) -> None:
    outcome = run(command, "--help")
    assert outcome.status == 0
    assert "Exit status: 0" in outcome.text


@pytest.mark.parametrize(
    "arguments", [["--help"], ["demo", "--help"], ["verify", "--help"], ["doctor"], ["record", "--check"]]
)
def test_nothing_heavy_is_imported(arguments: list[str]) -> None:
    script = (
        "import sys\n"
        "from vllm_dcp_hybrid.cli.main import app\n"
        f"status = app({arguments!r}, standalone_mode=False)\n"
        f"print('HEAVY', sorted({HEAVY!r} & set(sys.modules)))\n"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout.rstrip().endswith("HEAVY []")


def test_every_kind_on_offer_is_a_hybrid() -> None:
    assert "qwen3-next" in HYBRID_KINDS
    assert "lfm2" in HYBRID_KINDS
    assert "llama" not in HYBRID_KINDS


def test_unknown_kind_is_refused_with_the_known_ones(run: Callable) -> None:
    outcome = run("demo", "--model-kind", "llama")
    assert outcome.status == 2
    assert all(kind in outcome.raw for kind in HYBRID_KINDS)


def test_dcp_without_tp_is_refused(run: Callable) -> None:
    assert run("doctor", "-dcp", "2").status == 2
