# SPDX-License-Identifier: Apache-2.0
"""A vLLM made of a few files, so that the command line can be tested without the real one."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pytest
from typer.testing import CliRunner

from vllm_dcp_hybrid import patching
from vllm_dcp_hybrid.cli import diagnosis, installed, record
from vllm_dcp_hybrid.cli.main import app
from vllm_dcp_hybrid.patching import Patch, SourceNotFound

SOURCE = "def resolve(config):\n    return 1\n"


@dataclass
class Outcome:
    """What a command did: its exit status, and its output with white space folded."""

    status: int
    text: str
    raw: str


@pytest.fixture
def run() -> Callable[..., Outcome]:
    """Runs `vllm-dcp-hybrid ARGS...` in this process."""

    def invoke(*args: str) -> Outcome:
        result = CliRunner().invoke(app, list(args))
        if result.exception is not None and not isinstance(result.exception, SystemExit):
            raise result.exception
        return Outcome(result.exit_code, " ".join(result.output.split()), result.output)

    return invoke


@pytest.fixture(autouse=True)
def plain_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("VLLM_PLUGINS", "DCP_HYBRID", "VLLM_CPU_OMP_THREADS_BIND"):
        monkeypatch.delenv(name, raising=False)


@pytest.fixture
def no_vllm(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(package: str) -> Path:
        raise SourceNotFound(package)

    monkeypatch.setattr(installed, "package_root", missing)


@pytest.fixture
def fake_vllm(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """vLLM 9.9.9 of one module and one patch, without a release file; the package's directory."""
    root = tmp_path / "site" / "vllm"
    root.mkdir(parents=True)
    (root / "__init__.py").write_text("")
    (root / "_version.py").write_text("__version__ = version = '9.9.9+cpu'\n")
    (root / "sizes.py").write_text(SOURCE)
    releases = tmp_path / "releases"
    releases.mkdir()
    patches = (
        Patch(
            name="sizes",
            target="vllm.sizes:resolve",
            how="wrap",
            replacement="vllm_dcp_hybrid.plugin:apply_patches",
            processes=("engine_core",),
            releases="==9.9.9",
            why="a test",
            until="never",
        ),
    )
    monkeypatch.setattr(installed, "package_root", lambda package: root)
    monkeypatch.setattr(installed.metadata, "version", lambda name: {"vllm": "9.9.9+cpu"}[name])
    monkeypatch.setattr(installed, "entry_point", lambda: "vllm_dcp_hybrid:register")
    monkeypatch.setattr(patching.release_file, "release_dir", lambda: releases)
    monkeypatch.setattr(patching, "release_dir", lambda: releases)
    for module in (diagnosis, record):
        monkeypatch.setattr(module, "ALL_PATCHES", patches)
    return root


@pytest.fixture
def recorded_vllm(fake_vllm: Path, run: Callable[..., Outcome]) -> Path:
    """The same with its release file."""
    assert run("record").status == 0
    return fake_vllm
