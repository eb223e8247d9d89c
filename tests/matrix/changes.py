# SPDX-License-Identifier: Apache-2.0
"""What a reviewer has to read before a release is added: how the patched code differs from the release before it."""

from __future__ import annotations

import difflib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from vllm_dcp_hybrid import patching
from vllm_dcp_hybrid.declarations import ALL_PATCHES
from vllm_dcp_hybrid.patching import SourceNotFound, SourceTree
from vllm_dcp_hybrid.patching.release_file import fingerprinted


@dataclass(frozen=True)
class Change:
    """One target that differs between two releases.

    Attributes:
        target: `"module:name"`.
        patches: names of the patches for the newer release that change it or lean on it.
        lines: a unified diff of its source, or one sentence.
    """

    target: str
    patches: tuple[str, ...]
    lines: tuple[str, ...]


def changes(old: str, old_root: Path, new: str, new_root: Path) -> Iterator[Change]:
    """The targets of the newer release's patches whose source or bindings differ between two source trees.

    Args:
        old: the release before.
        old_root: its directory `vllm`.
        new: the release to add.
        new_root: its directory `vllm`.
    """
    selected = patching.select(ALL_PATCHES, new)
    users: dict[str, list[str]] = {}
    for patch in selected:
        for target in dict.fromkeys((patch.target, *fingerprinted(patch))):
            users.setdefault(target, []).append(patch.name)
    trees = SourceTree(old_root), SourceTree(new_root)
    for target, names in users.items():
        before, after = (source_of(target, tree) for tree in trees)
        lines = tuple(difflib.unified_diff(before, after, f"{target} in {old}", f"{target} in {new}", lineterm="", n=4))
        if lines:
            yield Change(target, tuple(names), lines)
    wrapped = [patch.target for patch in selected if patch.how == "wrap"]
    found_before, found_after = (patching.find_bindings(root, "vllm", wrapped) for root in (old_root, new_root))
    for target in wrapped:
        gone, come = ({*one.get(target, ())} for one in (found_before, found_after))
        if gone != come:
            words = [f"- also bound to {name}" for name in sorted(gone - come)]
            words += [f"+ also bound to {name}" for name in sorted(come - gone)]
            yield Change(target, tuple(users[target]), tuple(words))


def source_of(target: str, tree: SourceTree) -> list[str]:
    """The lines of a target, none where the release lacks it."""
    try:
        return tree.block(target).text.splitlines()
    except SourceNotFound:
        return []
