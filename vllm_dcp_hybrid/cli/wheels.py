# SPDX-License-Identifier: Apache-2.0
"""Find a wheel through uv or pip, and read the Python files out of it without downloading the rest.

A wheel of vLLM has 100 - 500 MB, its Python files 10: over HTTP, only the ranges that hold them are fetched.
"""

from __future__ import annotations

import importlib.util
import json
import os
import shutil
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Iterator
from contextlib import contextmanager
from importlib import metadata
from pathlib import Path
from typing import IO, Any
from urllib.parse import urlsplit
from urllib.request import url2pathname

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

# The wheel is read, not run: its tags need not fit this machine.
_PYTHON = "3.12"
_UV_PLATFORM = "x86_64-manylinux_2_39"
_PIP_PLATFORMS = [f"manylinux_2_{minor}_x86_64" for minor in range(39, 16, -1)]
_BLOCK_SIZE = 1 << 20
_TIMEOUT = 300


class WheelUnavailable(Exception):
    """Why a wheel cannot be read, in one sentence."""


def wheel_location(distribution: str, release: str) -> str:
    """URL of the wheel of a release for Linux on x86-64, by the package index that uv or pip is configured for.

    Raises:
        WheelUnavailable: there is none, the index does not answer, or neither tool is installed.
    """
    requirement = f"{distribution}=={release}"
    uv = shutil.which("uv")
    if uv is not None:
        return _ask_uv(uv, requirement)
    if has_pip_module():
        return _ask_pip([sys.executable, "-m", "pip"], requirement)
    pip = shutil.which("pip")
    if pip is not None:
        return _ask_pip([pip], requirement)
    raise WheelUnavailable(f"neither uv nor pip is installed, so nobody can say where {requirement} lies")


def has_pip_module() -> bool:
    """Whether `python -m pip` can be run.

    Its metadata says so: who asks for its spec makes setuptools give up its own distutils in this process, below
    Python 3.12, and torch then fails to import.
    """
    return any(metadata.distributions(name="pip"))


def extract_python(location: str, package: str, folder: Path) -> Path:
    """Write the Python files of one package of a wheel below `folder`.

    Args:
        location: URL of the wheel.
        package: top-level package.
        folder: an empty directory.

    Returns:
        The directory of the package.

    Raises:
        WheelUnavailable: the wheel cannot be read, or does not hold the package.
    """
    # What HTTP raises depends on fsspec's backend, which need not be imported here; a local disk raises OSError.
    try:
        with _opened(location) as file, zipfile.ZipFile(file) as archive:
            members = [
                member
                for member in archive.infolist()
                if member.filename.startswith(f"{package}/") and member.filename.endswith(".py")
            ]
            # In the order of the file, so that neighbours come with one request.
            for member in sorted(members, key=lambda member: member.header_offset):
                archive.extract(member, folder)
    except WheelUnavailable:
        raise
    except Exception as error:
        reason = _last_line(str(error)) or type(error).__name__
        raise WheelUnavailable(f"{location} cannot be read: {reason}") from error
    if not members:
        raise WheelUnavailable(f"{location} holds no Python files of {package}")
    return folder / package


def _ask_uv(uv: str, requirement: str) -> str:
    options = ["--quiet", "--no-deps", "--no-header", "--only-binary", ":all:", "--format", "pylock.toml"]
    # Nothing is built, so the interpreter of that version is not needed.
    system = ["--no-python-downloads", "--python-version", _PYTHON, "--python-platform", _UV_PLATFORM]
    answer = _output([uv, "pip", "compile", "-", *options, *system], requirement)
    (wheel,) = tomllib.loads(answer)["packages"][0]["wheels"][:1]
    location: str = wheel.get("url") or Path(wheel["path"]).resolve().as_uri()
    return location


def _ask_pip(pip: list[str], requirement: str) -> str:
    options = ["--dry-run", "--quiet", "--report", "-", "--ignore-installed", "--no-deps", "--only-binary", ":all:"]
    system = ["--python-version", _PYTHON, *(f"--platform={platform}" for platform in _PIP_PLATFORMS)]
    with tempfile.TemporaryDirectory() as target:  # pip wants one for a foreign platform
        answer = _output([*pip, "install", *options, *system, "--target", target, requirement], requirement)
    location: str = json.loads(answer)["install"][0]["download_info"]["url"]
    return location


def _output(command: list[str], requirement: str) -> str:
    try:
        done = subprocess.run(command, input=requirement, capture_output=True, text=True, check=False, timeout=_TIMEOUT)
    except subprocess.TimeoutExpired as error:
        raise WheelUnavailable(f"the package index does not answer {Path(command[0]).name} within 5 minutes") from error
    if done.returncode != 0:
        reason = _last_line(done.stderr).removeprefix("cause: ").removeprefix("ERROR: ")
        raise WheelUnavailable(f"{Path(command[0]).name} finds no wheel of {requirement} for Linux: {reason}")
    return done.stdout


@contextmanager
def _opened(location: str) -> Iterator[IO[bytes]]:
    """A wheel to seek in: a file, or ranges over HTTP where the server offers them, or else a download."""
    parts = urlsplit(location)
    if parts.scheme == "file":
        with Path(url2pathname(parts.path)).open("rb") as file:
            yield file
        return
    if any(importlib.util.find_spec(name) is None for name in ("fsspec", "aiohttp")):
        raise WheelUnavailable(f"fsspec and aiohttp are needed to read {location}: install `fsspec[http]`")
    import fsspec  # type: ignore[import-untyped]

    http: Any = fsspec.filesystem("http", client_kwargs={"trust_env": True})
    location = location.partition("#")[0]
    with http.open(location, block_size=_BLOCK_SIZE, cache_type="readahead") as file:
        if _can_seek(file):
            yield file
            return
    with tempfile.NamedTemporaryFile(suffix=".whl") as whole:
        http.get_file(location, whole.name)
        yield whole.file


def _can_seek(file: IO[bytes]) -> bool:
    """Whether the server sends the end of a file without the rest."""
    try:
        file.seek(-1, os.SEEK_END)
        return len(file.read(1)) == 1
    except ValueError:  # fsspec's answer to a server that ignores ranges
        return False


def _last_line(text: str) -> str:
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    return lines[-1] if lines else ""
