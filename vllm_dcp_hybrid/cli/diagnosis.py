# SPDX-License-Identifier: Apache-2.0
"""Would the plugin be applied here?  The findings of `doctor`, without their looks."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from packaging.version import InvalidVersion

from vllm_dcp_hybrid import __version__, activation, patching
from vllm_dcp_hybrid.cli import installed
from vllm_dcp_hybrid.cli.installed import InstalledVLLM
from vllm_dcp_hybrid.cli.machine import Machine, this_machine
from vllm_dcp_hybrid.cli.refusals import Refusal, declared_refusals
from vllm_dcp_hybrid.declarations import ALL_PATCHES, ERAS, Era, era_of

APPLIES = "applies"
OTHER_RELEASE = "not for this release"
NO_VLLM = "no vLLM"
NOT_APPLIED = "not applied"
# What is found where the installed vLLM is not the release that it says it is.
_DIFFERENCES = (patching.DriftedTarget, patching.MissingTarget, patching.NameTaken)


@dataclass(frozen=True)
class PatchFinding:
    """One patch, and what would become of it.

    Attributes:
        state: `APPLIES`, `OTHER_RELEASE`, `NO_VLLM`, `NOT_APPLIED` where the release is not known, or the sentence that
            says what is wrong.
    """

    name: str
    target: str
    how: str
    processes: tuple[str, ...]
    releases: str
    until: str
    state: str


@dataclass(frozen=True)
class Diagnosis:
    """Everything that `doctor` knows without a model.

    Attributes:
        vllm: the installed vLLM, None where there is none.
        era: what the plugin is for in its release, None where nothing is applied to that.
        release_file: the fingerprints of its release, None where the release is not known.
        release_dir: where such files lie.
        known_releases: the releases that have one, oldest first.
        entry_point: what vLLM would load under the plugin's name, None where it finds nothing.
        allowed_plugins: `VLLM_PLUGINS`, None where it is not set.
        is_switched_off: whether the kill switch is set.
        patches: in the order in which they are applied.
        reasons: why the plugin would not be in effect, one sentence each; empty where it would. The source comes first.
        num_differences: how many of them, from the first on, say that the source is not that of the release.
        refused: what is refused although the plugin is in effect.
        machine: what it would run on.
    """

    vllm: InstalledVLLM | None
    era: Era | None
    release_file: Path | None
    release_dir: Path
    known_releases: tuple[str, ...]
    entry_point: str | None
    allowed_plugins: list[str] | None
    is_switched_off: bool
    patches: tuple[PatchFinding, ...]
    reasons: tuple[str, ...]
    num_differences: int
    refused: tuple[Refusal, ...]
    machine: Machine

    @property
    def exit_status(self) -> int:
        """0 where the plugin would be in effect, 1 where not, 2 where there is no vLLM."""
        if self.vllm is None:
            return 2
        return 1 if self.reasons else 0


@dataclass(frozen=True)
class _Checked:
    """The fields of a diagnosis that follow from vLLM's source."""

    release_file: Path | None
    patches: tuple[PatchFinding, ...]
    reasons: tuple[str, ...]
    num_differences: int = 0


def diagnose() -> Diagnosis:
    """Look at this interpreter, its environment and this machine; imports neither torch nor vLLM."""
    vllm = installed.find_vllm()
    release_dir = patching.release_dir()
    known = patching.known_releases(release_dir)
    entry_point = installed.entry_point()
    allowed = installed.allowed_plugins()
    is_switched_off = activation.switched_off_by_environment()
    checked = _check_patches(vllm, known)
    era = era_of(vllm.version) if vllm is not None and checked.release_file is not None else None
    return Diagnosis(
        vllm=vllm,
        era=era,
        release_file=checked.release_file,
        release_dir=release_dir,
        known_releases=known,
        entry_point=entry_point,
        allowed_plugins=allowed,
        is_switched_off=is_switched_off,
        patches=checked.patches,
        num_differences=checked.num_differences,
        reasons=(*checked.reasons, *_environment_reasons(entry_point, allowed, is_switched_off)),
        # Without a release: those of the whole feature.
        refused=tuple(declared_refusals(era or ERAS[0])),
        machine=this_machine(),
    )


def _environment_reasons(entry_point: str | None, allowed: list[str] | None, is_switched_off: bool) -> list[str]:
    reasons = []
    if entry_point is None:
        reasons.append(
            f"No entry point {activation.PLUGIN_NAME!r} is registered, so vLLM does not find the plugin: "
            "install this package with pip or uv."
        )
    elif not installed.is_own_entry_point(entry_point):
        reasons.append(f"The entry point {activation.PLUGIN_NAME!r} belongs to {entry_point}: uninstall that package.")
    if allowed is not None and activation.PLUGIN_NAME not in allowed:
        reasons.append(
            f"VLLM_PLUGINS={','.join(allowed)} leaves the plugin out: add {activation.PLUGIN_NAME} to it, or unset it."
        )
    if is_switched_off:
        reasons.append(f"The kill switch {activation.KILL_SWITCH} is set to off: unset it.")
    return reasons


def _check_patches(vllm: InstalledVLLM | None, known: tuple[str, ...]) -> _Checked:
    if vllm is None:
        return _Checked(None, _findings(dict.fromkeys(ALL_PATCHES, NO_VLLM)), ("No vLLM is installed.",))
    try:
        selected = patching.select(ALL_PATCHES, vllm.version)
        path = patching.release_path(vllm.version)
    except InvalidVersion:
        reason = f"vLLM at {vllm.root} calls itself {vllm.version!r}, which is no version: install a released vLLM."
        return _Checked(None, _findings({}), (reason,))
    release_file = patching.load_release(vllm.version)
    if release_file is None or not selected:
        reason = (
            f"vLLM {vllm.version} is not a release that this version of the plugin knows "
            f"({', '.join(known) or 'none'}), so nothing would be applied: install one of those."
        )
        return _Checked(None, _findings(dict.fromkeys(selected, NOT_APPLIED)), (reason,))
    owner = f"vllm-dcp-hybrid {__version__}"
    problems = [
        *patching.check(selected, release_file, vllm.root, version=vllm.version, owner=owner),
        *patching.missing_replacements(selected),
    ]
    wrong = {getattr(problem, "patch", ""): str(problem) for problem in reversed(problems)}
    return _Checked(
        path,
        _findings({patch: wrong.get(patch.name, APPLIES) for patch in selected}),
        tuple(map(str, problems)),
        sum(isinstance(problem, _DIFFERENCES) for problem in problems),
    )


def _findings(states: Mapping[patching.Patch, str]) -> tuple[PatchFinding, ...]:
    """One per patch, in their order; those without a state are for other releases."""
    return tuple(
        PatchFinding(
            patch.name,
            patch.target,
            patch.how,
            tuple(patch.processes),
            patch.releases,
            patch.until,
            states.get(patch, OTHER_RELEASE),
        )
        for patch in ALL_PATCHES
    )
