# SPDX-License-Identifier: Apache-2.0
"""Decide whether the patches fit, before the first one is applied."""

from __future__ import annotations

import sys
from collections.abc import Iterable
from pathlib import Path

from vllm_dcp_hybrid.patching.live import ABSENT, foreign_owner, holder_of, module_of, own_attribute
from vllm_dcp_hybrid.patching.patch import Patch, public_version, split_name
from vllm_dcp_hybrid.patching.problems import (
    DriftedTarget,
    ForeignPatch,
    MissingReplacement,
    MissingTarget,
    PatchError,
    UnknownRelease,
    UnrecordedTarget,
)
from vllm_dcp_hybrid.patching.release_file import ReleaseFile, absence_problems, fingerprinted
from vllm_dcp_hybrid.patching.source import SourceNotFound, SourceTree, package_root
from vllm_dcp_hybrid.patching.wrapper import mark_of, resolve


def check(
    patches: Iterable[Patch],
    release_file: ReleaseFile | None,
    root_dir: Path,
    *,
    version: str,
    owner: str,
    tree: SourceTree | None = None,
) -> list[PatchError]:
    """All reasons not to apply `patches` in this process; imports nothing of the package.

    Args:
        patches: those selected for the release.
        release_file: of the release, None where there is none.
        root_dir: directory of the package.
        version: of the package that is installed.
        owner: whose own earlier patches are no problem.
        tree: to share what it has read already.

    Returns:
        Problems in the order of the patches: the release, then the source on disk, then loaded modules.
    """
    if release_file is None or release_file.release != public_version(version):
        return [UnknownRelease(root_dir.name, version)]
    tree = tree or SourceTree(root_dir)
    patches = tuple(patches)
    problems = [problem for patch in patches for problem in _source_problems(patch, release_file, tree)]
    return problems or [problem for patch in patches for problem in live_problems(patch, tree, owner)]


def live_problems(patch: Patch, tree: SourceTree, owner: str) -> list[PatchError]:
    """What is wrong with the objects of the loaded modules that `patch` is about to change.

    Other bindings are compared with the target when the patch is applied.
    """
    name = split_name(patch.target)
    holder = holder_of(name)
    if name.module not in sys.modules:
        return []
    value = own_attribute(holder, name.path[-1])
    if patch.how == "add":
        if holder is ABSENT:
            return [MissingTarget(patch.name, patch.target, tree.where(name.module))]
        if value is ABSENT or _is_added_already(patch, value):
            return []
        return [ForeignPatch(patch.name, patch.target, module_of(value), owner)]
    if value is ABSENT:
        return [MissingTarget(patch.name, patch.target, f"the loaded module {name.module}")]
    if mark_of(value) == (owner, patch.name):
        return []
    foreign = foreign_owner(name, value, tree)
    return [] if foreign is None else [ForeignPatch(patch.name, patch.target, foreign, owner)]


def missing_replacements(patches: Iterable[Patch]) -> list[MissingReplacement]:
    """The patches whose replacement is not in our source; nothing is imported. For tests."""
    trees: dict[str, SourceTree] = {}
    problems = []
    for patch in patches:
        package = split_name(patch.replacement).package
        try:
            if package not in trees:
                trees[package] = SourceTree(package_root(package))
            trees[package].block(patch.replacement)
        except SourceNotFound:
            problems.append(MissingReplacement(patch.name, patch.replacement))
    return problems


def _is_added_already(patch: Patch, value: object) -> bool:
    """Whether `value` is the replacement, which was then imported to be added."""
    return split_name(patch.replacement).module in sys.modules and resolve(patch.replacement) is value


def _source_problems(patch: Patch, release: ReleaseFile, tree: SourceTree) -> list[PatchError]:
    problems: list[PatchError] = []
    if patch.how == "add" and not (
        patch.target in release.absent and _is_unchanged(split_name(patch.target).module, release, tree)
    ):
        problems += absence_problems(patch, tree)
    if patch.how == "wrap" and patch.target in release.records and patch.target not in release.bindings:
        # Recorded for a patch that leans on it only, so nobody looked for its other names.
        problems.append(UnrecordedTarget(patch.name, patch.target, release.release))
    for target in fingerprinted(patch):
        problem = _drift(patch, target, release, tree)
        if problem is not None:
            problems.append(problem)
    return problems


def _drift(patch: Patch, target: str, release: ReleaseFile, tree: SourceTree) -> PatchError | None:
    module = split_name(target).module
    recorded = release.records.get(target)
    if recorded is not None and _is_unchanged(module, release, tree):
        return None
    try:
        block = tree.block(target)
    except SourceNotFound:
        return MissingTarget(patch.name, target, tree.where(module))
    if recorded is None:
        return UnrecordedTarget(patch.name, target, release.release)
    if block.digest == recorded.digest:
        return None
    file = tree.relative_file_of(module)
    return DriftedTarget(patch.name, target, file, block.line, release.release)


def _is_unchanged(module: str, release: ReleaseFile, tree: SourceTree) -> bool:
    """Whether the whole file is the recorded one, which spares a look at its blocks."""
    try:
        return release.file_digests.get(tree.relative_file_of(module)) == tree.file_digest(module)
    except SourceNotFound:
        return False
