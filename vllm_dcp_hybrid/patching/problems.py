# SPDX-License-Identifier: Apache-2.0
"""One class per reason not to patch. Each message says what is wrong, why it matters and what to do."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields
from typing import Any, ClassVar


@dataclass(eq=False)
class PatchError(Exception):
    """Base of all refusals. The fields of a subclass fill its `template`; instances can be pickled."""

    template: ClassVar[str] = ""

    def __str__(self) -> str:
        return self.template.format(**{field.name: getattr(self, field.name) for field in fields(self)})

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), tuple(getattr(self, field.name) for field in fields(self))


@dataclass(eq=False)
class UnknownRelease(PatchError):
    template = (
        "{package} {version} has no release file, so nothing vouches for its source and no patch is applied: "
        "use a release that is supported, or record one for it."
    )
    package: str
    version: str


@dataclass(eq=False)
class MissingTarget(PatchError):
    template = (
        "{target}, which patch '{patch}' needs, is not defined in {where} (a method must be defined in the "
        "class itself, not inherited): it was renamed, moved or removed, so adapt the patch to this release."
    )
    patch: str
    target: str
    where: str


@dataclass(eq=False)
class UnrecordedTarget(PatchError):
    template = (
        "{target}, which patch '{patch}' needs, has no fingerprint in the release file of {release}, so its "
        "source cannot be vouched for: review it and write the release file again."
    )
    patch: str
    target: str
    release: str


@dataclass(eq=False)
class DriftedTarget(PatchError):
    template = (
        "{target} at {file}:{line}, which patch '{patch}' needs, is not the source recorded for {release}, so "
        "the patch may no longer fit: reinstall the stock release, or review the patch and record it again."
    )
    patch: str
    target: str
    file: str
    line: int
    release: str


@dataclass(eq=False)
class NameTaken(PatchError):
    template = (
        "{target}, which patch '{patch}' adds because the release lacks it, is already defined in {where}: "
        "restrict the patch to releases without it."
    )
    patch: str
    target: str
    where: str


@dataclass(eq=False)
class ForeignPatch(PatchError):
    template = (
        "{target}, which patch '{patch}' of {owner} needs, was already changed in this process by "
        "'{foreign_owner}', so two changes would meet: disable one of the two."
    )
    patch: str
    target: str
    foreign_owner: str
    owner: str


@dataclass(eq=False)
class UnsupportedTarget(PatchError):
    template = (
        "{target}, the target of patch '{patch}', is a {kind}, which the mechanism cannot wrap: "
        "target a function, method, classmethod or staticmethod."
    )
    patch: str
    target: str
    kind: str


@dataclass(eq=False)
class MissingReplacement(PatchError):
    template = (
        "{replacement}, which patch '{patch}' installs, does not exist, so the first call of its target "
        "would fail: correct the declaration."
    )
    patch: str
    replacement: str


@dataclass(eq=False)
class NotInUse(PatchError):
    template = (
        "Patch '{patch}' was applied, but {name} now holds an object of '{holder}', so the change is not in "
        "effect there: find what overwrote it after the patches were applied, and disable one of the two."
    )
    patch: str
    name: str
    holder: str


@dataclass(eq=False)
class SeveralProblems(PatchError):
    """More than one problem at once; `problems` holds them."""

    problems: tuple[PatchError, ...]

    def __str__(self) -> str:
        lines = [f"{len(self.problems)} problems, so no patch is applied:"]
        return "\n- ".join([*lines, *map(str, self.problems)])


def raise_problems(problems: Sequence[PatchError]) -> None:
    """Raise the only problem itself, or several of them together; return if there is none."""
    if len(problems) == 1:
        raise problems[0]
    if problems:
        raise SeveralProblems(tuple(problems))
