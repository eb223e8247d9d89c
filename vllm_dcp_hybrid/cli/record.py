# SPDX-License-Identifier: Apache-2.0
"""`record`: write, or compare, the fingerprints of vLLM releases.  For maintainers."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from packaging.version import InvalidVersion, Version
from rich.console import Console

from vllm_dcp_hybrid import patching
from vllm_dcp_hybrid.cli import sources
from vllm_dcp_hybrid.cli.installed import INSTALL_HINT, find_vllm
from vllm_dcp_hybrid.cli.sources import SourcesUnavailable
from vllm_dcp_hybrid.declarations import ALL_PATCHES

MADE_BY = "vllm-dcp-hybrid record"


@dataclass(frozen=True, kw_only=True)
class RecordOptions:
    """What to fingerprint, and what to do with it.

    Args:
        releases: to fetch; none for the installed vLLM, or for `source`.
        is_all_known: also every release that has a file.
        distribution: whose wheels to fetch.
        source: a source tree that is at hand.
        cache: of fetched sources; None for the user's.
        directory: of release files; None for this package's.
        check_only: compare, write nothing.
    """

    releases: tuple[str, ...] = ()
    is_all_known: bool = False
    distribution: str = sources.DISTRIBUTION
    source: Path | None = None
    cache: Path | None = None
    directory: Path | None = None
    check_only: bool = False


@dataclass(frozen=True)
class _Outcome:
    status: int
    text: str


class _Impossible(Exception):
    """Why a release cannot be recorded, in one sentence."""


class _NoVLLM(Exception):
    """There is nothing to record."""


def run_record(options: RecordOptions, console: Console) -> int:
    """Fingerprint releases of vLLM; write the release files, or compare them with those that lie there.

    Returns:
        The exit status: 0 all written or equal, 1 any different or impossible, 2 no vLLM.
    """
    worst = 0
    for outcome in _outcomes(options):
        console.print(
            outcome.text, style="red" if outcome.status else "", highlight=False, markup=False, soft_wrap=True
        )
        worst = max(worst, outcome.status)
    return worst


def differences(recorded: patching.ReleaseFile, found: patching.ReleaseFile) -> Iterator[str]:
    """What differs in anything that patches rely on, one phrase each."""
    for target in sorted({*recorded.records, *found.records}):
        before, now = recorded.records.get(target), found.records.get(target)
        if before is None:
            yield f"{target} is not recorded"
        elif now is None:
            yield f"{target} is recorded, and no patch needs it"
        elif (before.digest, before.signature) != (now.digest, now.signature):
            yield f"the source of {target} changed ({now.file}:{now.line})"
        elif recorded.bindings.get(target) != found.bindings.get(target):
            yield f"{target} is bound to other names: {', '.join(found.bindings.get(target, ())) or 'none'}"
    for target in sorted({*recorded.absent} ^ {*found.absent}):
        yield f"{target} is {'not ' if target in found.absent else ''}recorded as absent"
    if recorded.release != found.release:
        yield f"it is of release {recorded.release}"


def moves(recorded: patching.ReleaseFile, found: patching.ReleaseFile) -> Iterator[str]:
    """What differs around the targets, one phrase each: files as a whole, and lines."""
    for file in sorted({*recorded.file_digests, *found.file_digests}):
        if recorded.file_digests.get(file) != found.file_digests.get(file):
            yield f"{file} differs outside of the targets"
    for target in sorted(recorded.records.keys() & found.records.keys()):
        before, now = recorded.records[target], found.records[target]
        if (before.file, before.line) != (now.file, now.line):
            yield f"{target} moved to {now.file}:{now.line}"


def _outcomes(options: RecordOptions) -> Iterator[_Outcome]:
    known = patching.known_releases(options.directory) if options.is_all_known else ()
    releases = dict.fromkeys([*options.releases, *known])
    if not releases or options.source is not None:
        yield _outcome_of(options, options.releases[0] if options.releases else None)
        return
    for release in releases:
        yield _outcome_of(options, release)


def _outcome_of(options: RecordOptions, release: str | None) -> _Outcome:
    try:
        root, version = _tree(options, release)
        path = patching.release_path(version, options.directory)
        found = _fingerprints(root, version)
    except _NoVLLM:
        return _Outcome(2, f"record: no vLLM is installed. {INSTALL_HINT}")
    except (_Impossible, SourcesUnavailable, patching.PatchError) as error:
        return _Outcome(1, f"record: {error}".removesuffix(".") + ".")
    return _compare(path, found, root) if options.check_only else _write(path, found)


def _tree(options: RecordOptions, release: str | None) -> tuple[Path, str]:
    """(the directory `vllm`, its version) that are meant."""
    try:
        if options.source is not None:
            root, version = sources.given_tree(options.source, release)
        elif release is not None:
            version = str(Version(release))
            root = sources.fetch_tree(release, distribution=options.distribution, cache=options.cache)
        else:
            vllm = find_vllm()
            if vllm is None:
                raise _NoVLLM
            root, version = vllm.root, vllm.version
            release = version
        Version(version)
    except InvalidVersion as error:
        raise _Impossible(f"{release or options.source} calls itself {error}, which is no version") from error
    return root, version


def _fingerprints(root: Path, version: str) -> patching.ReleaseFile:
    if not patching.select(ALL_PATCHES, version):
        raise _Impossible(f"no patch claims vLLM {version}; extend `releases` in declarations.py first")
    try:
        return patching.record(ALL_PATCHES, root, release=version, made_by=MADE_BY)
    except ValueError as error:
        raise _Impossible(f"the patches for vLLM {version} contradict each other: {error}") from error


def _write(path: Path, found: patching.ReleaseFile) -> _Outcome:
    path.parent.mkdir(parents=True, exist_ok=True)
    patching.write_release_file(found, path)
    text = f"{path}: {len(found.records)} targets of vLLM {found.release} in {len(found.file_digests)} files"
    return _Outcome(0, text)


def _compare(path: Path, found: patching.ReleaseFile, root: Path) -> _Outcome:
    if not path.is_file():
        return _Outcome(1, f"record: {path} does not exist; run `vllm-dcp-hybrid record` to write it.")
    recorded = patching.read_release_file(path)
    here = f"vLLM {found.release} at {root}"
    difference = next(differences(recorded, found), None)
    if difference is not None:
        return _Outcome(1, f"record: {path} is not what {here} gives: {difference}")
    around = "".join(f"; {phrase}" for phrase in moves(recorded, found))
    return _Outcome(0, f"{path}: equal to {here}, {len(found.records)} targets{around}")
