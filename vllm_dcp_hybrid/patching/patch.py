# SPDX-License-Identifier: Apache-2.0
"""One patch is one declaration: what is changed, how, for which releases, why, and until when."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable
from dataclasses import dataclass
from typing import Literal, NamedTuple

from packaging.specifiers import InvalidSpecifier, SpecifierSet
from packaging.version import InvalidVersion, Version

_KEBAB_CASE = re.compile(r"[a-z0-9]+(-[a-z0-9]+)*\Z")
_DOTTED = r"[A-Za-z_]\w*(?:\.[A-Za-z_]\w*)*"
_NAME = re.compile(rf"({_DOTTED}):({_DOTTED})\Z")


class Name(NamedTuple):
    """A name in a module, split: `"pkg.mod:Class.method"` is `("pkg.mod", ("Class", "method"))`."""

    module: str
    path: tuple[str, ...]

    @property
    def package(self) -> str:
        return self.module.partition(".")[0]

    def __str__(self) -> str:
        return f"{self.module}:{'.'.join(self.path)}"


def split_name(text: str) -> Name:
    """Split `"pkg.mod:Class.method"`.

    Raises:
        ValueError: it is not of the form `module:name`.
    """
    match = _NAME.match(text)
    if match is None:
        raise ValueError(f"{text!r} is not of the form 'package.module:name' or 'package.module:Class.name'")
    return Name(match[1], tuple(match[2].split(".")))


@dataclass(frozen=True, kw_only=True)
class Patch:
    """One change to one function of the patched package.

    Args:
        name: kebab-case. Unique among the patches for one release: variants for other releases may share it.
        target: `"pkg.mod:func"` or `"pkg.mod:Class.method"`; a method must be defined in that very class.
        how: `"wrap"` calls `replacement(wrapped, instance, args, kwargs)` in place of the target;
            `"add"` binds the object `replacement` to a name that the release lacks.
        replacement: `"our.module:callable"`. A wrapper is imported at the first call of the target,
            an added object when the target's module is imported.
        leans_on: functions, classes and constants whose source the replacement relies on.
        processes: where the patch is needed; informative.
        releases: PEP 440 specifier of the releases that it is written for.
        why: what is wrong, or missing, without it.
        until: what makes it deletable: a version such as `"0.26.0"`, or an event in words.
        probe: whether `Applied.probe` looks at it.
    """

    name: str
    target: str
    how: Literal["wrap", "add"]
    replacement: str
    leans_on: tuple[str, ...] = ()
    processes: Collection[str]
    releases: str
    why: str
    until: str
    probe: bool = True

    def __post_init__(self) -> None:
        if not _KEBAB_CASE.match(self.name):
            raise ValueError(f"patch name {self.name!r} is not kebab-case")
        if self.how not in ("wrap", "add"):
            raise ValueError(f"patch {self.name!r}: how={self.how!r} is neither 'wrap' nor 'add'")
        for field in ("leans_on", "processes"):
            if isinstance(getattr(self, field), str):
                raise TypeError(f"patch {self.name!r}: {field} is a string where a tuple is meant")
        for text in (self.target, self.replacement, *self.leans_on):
            split_name(text)
        try:
            SpecifierSet(self.releases)
        except InvalidSpecifier as error:
            raise ValueError(f"patch {self.name!r}: releases={self.releases!r} is no specifier") from error
        if not self.releases.strip() or not self.why.strip() or not self.until.strip():
            raise ValueError(f"patch {self.name!r}: releases, why and until must say something")

    def claims(self, version: str) -> bool:
        """Whether the patch is written for release `version` (a local suffix such as `+cpu` is ignored)."""
        return is_among(version, self.releases)


def is_among(version: str, releases: str) -> bool:
    """Whether release `version` (a local suffix is ignored) is among those of a PEP 440 specifier."""
    return SpecifierSet(releases).contains(public_version(version), prereleases=True)


def public_version(version: str) -> str:
    """`version` normalised and without its local suffix: `"0.25.1+cpu"` is release `"0.25.1"`."""
    return Version(version).public


def select(patches: Iterable[Patch], version: str) -> tuple[Patch, ...]:
    """The patches written for release `version`, in their order."""
    return tuple(patch for patch in patches if patch.claims(version))


def expired(patches: Iterable[Patch], version: str) -> tuple[Patch, ...]:
    """The patches that still claim release `version` although their `until` names a version not above it.

    An `until` in words never expires here: a person has to judge it.
    """
    now = Version(public_version(version))
    return tuple(patch for patch in select(patches, version) if _is_due(patch.until, now))


def check_unique(patches: Iterable[Patch], package: str) -> None:
    """Refuse a list of patches for one release that contradicts itself.

    Raises:
        ValueError: a name or a target occurs twice, or a target lies outside of `package`.
    """
    names: set[str] = set()
    targets: dict[str, str] = {}
    for patch in patches:
        if patch.name in names:
            raise ValueError(f"two patches are named {patch.name!r}")
        names.add(patch.name)
        if patch.target in targets:
            raise ValueError(f"patches {targets[patch.target]!r} and {patch.name!r} both change {patch.target}")
        targets[patch.target] = patch.name
        for text in (patch.target, *patch.leans_on):
            if split_name(text).package != package:
                raise ValueError(f"patch {patch.name!r}: {text} lies outside of package {package!r}")


def _is_due(until: str, now: Version) -> bool:
    try:
        return Version(until) <= now
    except InvalidVersion:
        return False
