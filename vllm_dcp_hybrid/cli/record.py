# SPDX-License-Identifier: Apache-2.0
"""`record`: write, or compare, the fingerprints of the installed vLLM.  For maintainers."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from packaging.version import InvalidVersion
from rich.console import Console

from vllm_dcp_hybrid import patching
from vllm_dcp_hybrid.cli.installed import INSTALL_HINT, find_vllm
from vllm_dcp_hybrid.declarations import ALL_PATCHES

MADE_BY = "vllm-dcp-hybrid record"


def run_record(directory: Path | None, *, check_only: bool, console: Console) -> int:
    """Fingerprint the installed vLLM, then write the release file or compare it with the one that lies there.

    Returns:
        The exit status: 0 written or equal, 1 different or impossible, 2 no vLLM.
    """

    def say(text: str, style: str = "") -> None:
        console.print(text, style=style, highlight=False, markup=False, soft_wrap=True)

    vllm = find_vllm()
    if vllm is None:
        say(f"record: no vLLM is installed. {INSTALL_HINT}", "red")
        return 2
    try:
        is_claimed = bool(patching.select(ALL_PATCHES, vllm.version))
        path = patching.release_path(vllm.version, directory)
    except InvalidVersion:
        say(f"record: vLLM at {vllm.root} calls itself {vllm.version!r}, which is no version.", "red")
        return 1
    if not is_claimed:
        say(f"record: no patch claims vLLM {vllm.version}; extend `releases` in declarations.py first.", "red")
        return 1
    try:
        found = patching.record(ALL_PATCHES, vllm.root, release=vllm.version, made_by=MADE_BY)
    except patching.PatchError as error:
        say(f"record: {error}", "red")
        return 1
    if not check_only:
        path.parent.mkdir(parents=True, exist_ok=True)
        patching.write_release_file(found, path)
        say(f"{path}: {len(found.records)} targets of vLLM {found.release} in {len(found.file_digests)} files")
        return 0
    if not path.is_file():
        say(f"record: {path} does not exist; run `vllm-dcp-hybrid record` to write it.", "red")
        return 1
    difference = next(differences(patching.read_release_file(path), found), None)
    if difference is not None:
        say(f"record: {path} is not what vLLM {vllm.version} at {vllm.root} gives: {difference}", "red")
        return 1
    say(f"{path}: equal to vLLM {vllm.version} at {vllm.root}, {len(found.records)} targets")
    return 0


def differences(recorded: patching.ReleaseFile, found: patching.ReleaseFile) -> Iterator[str]:
    """What differs, one phrase each; targets come before whole files."""
    for target in sorted({*recorded.records, *found.records}):
        before, now = recorded.records.get(target), found.records.get(target)
        if before is None:
            yield f"{target} is not recorded"
        elif now is None:
            yield f"{target} is recorded, and no patch needs it"
        elif before.digest != now.digest:
            yield f"the source of {target} changed ({now.file}:{now.line})"
        elif before != now:
            yield f"{target} moved to {now.file}:{now.line}"
        elif recorded.bindings.get(target) != found.bindings.get(target):
            yield f"{target} is bound to other names: {', '.join(found.bindings.get(target, ())) or 'none'}"
    for target in sorted({*recorded.absent} ^ {*found.absent}):
        yield f"{target} is {'not ' if target in found.absent else ''}recorded as absent"
    for file in sorted({*recorded.file_digests, *found.file_digests}):
        if recorded.file_digests.get(file) != found.file_digests.get(file):
            yield f"{file} changed outside of the targets"
    if recorded.release != found.release:
        yield f"it is of release {recorded.release}"
