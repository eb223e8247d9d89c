# SPDX-License-Identifier: Apache-2.0
"""This process's state: which patches are applied, or why none are."""

from __future__ import annotations

import logging
import multiprocessing
from dataclasses import dataclass

from packaging.version import InvalidVersion

from vllm_dcp_hybrid import __version__, patching
from vllm_dcp_hybrid.declarations import ENTRY_PATCHES, FEATURE_PATCHES

logger = logging.getLogger("vllm.dcp_hybrid")

OWNER = f"vllm-dcp-hybrid {__version__}"


@dataclass(frozen=True)
class PluginStatus:
    """What register() did in this process.

    Attributes:
        vllm_version: the installed vLLM's version; empty before register() ran.
        entry: the patches of the command line and the configuration, None where they could not be applied.
        feature: the patches of the feature itself, None where they could not be applied.
        refusal: why not, in one sentence; None where all is well or nothing ran yet.
    """

    vllm_version: str = ""
    entry: patching.Applied | None = None
    feature: patching.Applied | None = None
    refusal: str | None = None

    @property
    def is_applied(self) -> bool:
        """Whether the feature can be used in this process."""
        return self.feature is not None and self.entry is not None

    @property
    def fingerprint(self) -> str:
        """Short hex over plugin version, release, patches and source digests: equal in every process."""
        return self.feature.fingerprint if self.feature else "none"

    def summary(self) -> str:
        """The beginning of every line that the plugin logs."""
        num_patches = sum(len(applied.patches) for applied in (self.entry, self.feature) if applied)
        return f"{OWNER} on vLLM {self.vllm_version} ({num_patches} patches, fingerprint {self.fingerprint})"


_status = PluginStatus()


def status() -> PluginStatus:
    """The state of this process."""
    return _status


def apply_patches() -> PluginStatus:
    """Apply all patches for the installed release; only the first call of a process does or says anything.

    Never raises for a vLLM that is unknown, modified or patched by somebody else: stock's own refusal of hybrid models
    under DCP then stands, one warning says why, and ``--enable-plugin`` turns it into an error.
    """
    global _status
    if _status.vllm_version:
        return _status
    import vllm

    version = vllm.__version__
    entry, refusal = _apply(ENTRY_PATCHES, version)
    feature, feature_refusal = _apply(FEATURE_PATCHES, version) if entry else (None, None)
    _status = PluginStatus(version, entry, feature, refusal or feature_refusal)
    if _status.refusal and multiprocessing.parent_process() is None:
        logger.warning("%s is not applied: %s", OWNER, _status.refusal)
    return _status


def _apply(patches: tuple[patching.Patch, ...], version: str) -> tuple[patching.Applied | None, str | None]:
    try:
        release_file = patching.load_release(version)
        applied = patching.apply(patches, package="vllm", version=version, owner=OWNER, release_file=release_file)
    except patching.PatchError as error:
        return None, str(error)
    except InvalidVersion:
        return None, str(patching.UnknownRelease("vllm", version))
    except (OSError, ValueError) as error:
        return None, f"its release file for vLLM {version} cannot be read: {error}; reinstall vllm-dcp-hybrid."
    return applied, None


def undo_patches() -> None:
    """Put stock vLLM back.  For tests."""
    global _status
    for applied in (_status.feature, _status.entry):
        if applied is not None:
            applied.undo()
    _status = PluginStatus()
