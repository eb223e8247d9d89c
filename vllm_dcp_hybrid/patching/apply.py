# SPDX-License-Identifier: Apache-2.0
"""Apply patches: all or none, now where the module is loaded, at its import where it is not."""

from __future__ import annotations

import functools
import hashlib
import sys
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from types import FunctionType, ModuleType
from typing import Any

import wrapt

from vllm_dcp_hybrid.patching.check import check, live_problems
from vllm_dcp_hybrid.patching.live import ABSENT, holder_of, is_initializing, module_of, own_attribute
from vllm_dcp_hybrid.patching.patch import Name, Patch, check_unique, select, split_name
from vllm_dcp_hybrid.patching.problems import (
    ForeignPatch,
    MissingTarget,
    NotInUse,
    PatchError,
    UnsupportedTarget,
    raise_problems,
)
from vllm_dcp_hybrid.patching.release_file import ReleaseFile, fingerprinted
from vllm_dcp_hybrid.patching.source import SourceTree, package_root
from vllm_dcp_hybrid.patching.wrapper import PatchWrapper, mark_of, resolve

# Not any callable: a compiled kernel, for example, is used by subscription, which a wrapper would not see.
_WRAPPABLE = (FunctionType, staticmethod, classmethod, type(functools.lru_cache(abs)))


@dataclass(frozen=True)
class ProbeReport:
    """What a look at the running process shows.

    Args:
        in_use: names of the patches that are in effect wherever their target is bound.
        pending: names of those whose target's module is not imported yet.
        problems: one `NotInUse` per name that holds something else.
    """

    in_use: tuple[str, ...]
    pending: tuple[str, ...]
    problems: tuple[PatchError, ...]


@dataclass(frozen=True)
class _Change:
    holder: Any
    attribute: str
    old: Any
    new: Any


def apply(
    patches: Iterable[Patch],
    *,
    package: str,
    version: str,
    owner: str,
    release_file: ReleaseFile | None,
    root_dir: Path | None = None,
) -> Applied:
    """Check all patches that claim `version`, then apply all of them.

    Applying again, also in a forked child or by another copy of this code, changes nothing.

    Args:
        patches: in the order in which to apply them.
        package: the top-level package to patch.
        version: of it that is installed.
        owner: who patches, with its own version; equal in every process.
        release_file: of the release, None where there is none.
        root_dir: directory of the package, looked up if not given.

    Raises:
        PatchError: why no patch was applied (`SeveralProblems` holds more than one reason).
        ValueError: the list contradicts itself.
    """
    selected = select(patches, version)
    check_unique(selected, package)
    root_dir = root_dir or package_root(package)
    tree = SourceTree(root_dir)
    raise_problems(check(selected, release_file, root_dir, version=version, owner=owner, tree=tree))
    assert release_file is not None  # or there was a problem
    applied = Applied(selected, package=package, owner=owner, release_file=release_file, tree=SourceTree(root_dir))
    applied._start()
    return applied


class Applied:
    """The patches of one owner in this process.

    Attributes:
        fingerprint: short hex over owner, release, patch names and digests: equal in every process.
    """

    def __init__(
        self,
        patches: tuple[Patch, ...],
        *,
        package: str,
        owner: str,
        release_file: ReleaseFile,
        tree: SourceTree,
    ) -> None:
        self.patches = patches
        self.package = package
        self.owner = owner
        self.release = release_file.release
        self.fingerprint = _fingerprint(patches, owner, release_file)
        # By patch, every name that holds its target: the target's own first, then those of from-imports.
        self._names = {p.name: (p.target, *release_file.bindings.get(p.target, ())) for p in patches}
        self._tree = tree
        self._journal: list[_Change] = []
        self._is_active = True

    @property
    def pending(self) -> tuple[str, ...]:
        """Names of the patches whose target's module is not imported yet."""
        return tuple(p.name for p in self.patches if split_name(p.target).module not in sys.modules)

    def probe(self) -> ProbeReport:
        """Compare every name that a loaded patch should have changed with what it holds now."""
        problems = [problem for patch in self.patches if patch.probe for problem in self._probe_problems(patch)]
        failed = {problem.patch for problem in problems}
        pending = self.pending
        in_use = (patch.name for patch in self.patches if patch.probe and patch.name not in {*failed, *pending})
        return ProbeReport(tuple(in_use), pending, tuple(problems))

    def undo(self) -> None:
        """Put everything back that this object changed, and disarm its import hooks. For tests."""
        self._is_active = False
        wrappers = [(change.new, change.old) for change in self._journal if change.old is not ABSENT]
        self._roll_back(0)
        self._rebind(wrappers)  # modules that were imported later
        self._journal.clear()

    def _start(self) -> None:
        try:
            self._install(self.patches)
        except BaseException:
            self._is_active = False
            self._roll_back(0)
            raise
        modules = {split_name(text).module for names in self._names.values() for text in names}
        for module in sorted(modules - sys.modules.keys()):
            wrapt.register_post_import_hook(self._on_import, module)

    def _on_import(self, module: ModuleType) -> None:
        """Patch a module that was just executed; its import fails if that fails."""
        if not self._is_active:
            return
        name = module.__name__
        length = len(self._journal)
        try:
            self._install((p for p in self.patches if self._concerns(p, name)), executed=name)
        except BaseException:
            self._roll_back(length)
            # The hook is spent: a second attempt to import the module must not find it unguarded.
            sys.modules.pop(name, None)
            wrapt.register_post_import_hook(self._on_import, name)
            raise

    def _concerns(self, patch: Patch, module: str) -> bool:
        return any(split_name(text).module == module for text in self._names[patch.name])

    def _install(self, patches: Iterable[Patch], executed: str | None = None) -> None:
        """Change each target that is loaded, then all other names of the same objects.

        `executed` names the module whose import hook this is: it has all its names by now.
        """
        replaced = []
        for patch in patches:
            if split_name(patch.target).module not in sys.modules:
                continue
            raise_problems(live_problems(patch, self._tree, self.owner))
            if patch.how == "add":
                self._add(patch)
            else:
                replaced.append((patch, *self._wrap(patch)))
        for patch, original, wrapper in replaced:
            for text in self._names[patch.name][1:]:
                self._change_binding(patch, split_name(text), original, wrapper, executed)
        self._rebind([(original, wrapper) for _, original, wrapper in replaced])

    def _add(self, patch: Patch) -> None:
        name = split_name(patch.target)
        holder = holder_of(name)
        if own_attribute(holder, name.path[-1]) is ABSENT:
            self._set(holder, name.path[-1], resolve(patch.replacement))

    def _wrap(self, patch: Patch) -> tuple[Any, PatchWrapper]:
        """The original and the wrapper that stands in its place now."""
        name = split_name(patch.target)
        holder = holder_of(name)
        value = own_attribute(holder, name.path[-1])
        if mark_of(value) is not None:
            return value.__wrapped__, value
        if not isinstance(value, _WRAPPABLE):
            raise UnsupportedTarget(patch.name, patch.target, type(value).__name__)
        wrapper = PatchWrapper(value, patch, self.owner)
        self._set(holder, name.path[-1], wrapper)
        return value, wrapper

    def _change_binding(
        self, patch: Patch, name: Name, original: Any, wrapper: PatchWrapper, executed: str | None
    ) -> None:
        holder = holder_of(name)
        value = own_attribute(holder, name.path[-1])
        if name.module not in sys.modules or value is wrapper:
            return
        if value is original:
            self._set(holder, name.path[-1], wrapper)
        elif value is not ABSENT:
            raise ForeignPatch(patch.name, str(name), module_of(value), self.owner)
        elif name.module == executed or not is_initializing(name.module):  # else it is about to import the wrapper
            raise MissingTarget(patch.name, str(name), f"the loaded module {name.module}")

    def _rebind(self, pairs: list[tuple[Any, Any]]) -> None:
        """Where a module of the package holds the first of a pair, let it hold the second."""
        new_by_id = {id(old): new for old, new in pairs}
        if not new_by_id:
            return
        for name, module in list(sys.modules.items()):
            is_ours = name == self.package or name.startswith(self.package + ".")
            if is_ours and isinstance(module, ModuleType):
                for attribute, value in list(vars(module).items()):
                    if id(value) in new_by_id:
                        self._set(module, attribute, new_by_id[id(value)])

    def _set(self, holder: Any, attribute: str, new: Any) -> None:
        self._journal.append(_Change(holder, attribute, own_attribute(holder, attribute), new))
        setattr(holder, attribute, new)

    def _roll_back(self, length: int) -> None:
        """Undo all changes but the first `length`; what others changed since then stays."""
        while len(self._journal) > length:
            change = self._journal.pop()
            if own_attribute(change.holder, change.attribute) is not change.new:
                continue
            if change.old is ABSENT:
                delattr(change.holder, change.attribute)
            else:
                setattr(change.holder, change.attribute, change.old)

    def _probe_problems(self, patch: Patch) -> Iterator[NotInUse]:
        for text in self._names[patch.name]:
            name = split_name(text)
            value = own_attribute(holder_of(name), name.path[-1])
            if name.module not in sys.modules:
                continue
            if patch.how == "add":
                is_in_use = value is not ABSENT and value is resolve(patch.replacement)
            else:
                is_in_use = mark_of(value) == (self.owner, patch.name)
            if not is_in_use:
                yield NotInUse(patch.name, text, "nobody" if value is ABSENT else module_of(value))


def _fingerprint(patches: tuple[Patch, ...], owner: str, release_file: ReleaseFile) -> str:
    names = sorted(patch.name for patch in patches)
    targets = sorted({target for patch in patches for target in fingerprinted(patch)})
    digests = [f"{target} {release_file.records[target].digest}" for target in targets]
    text = "\n".join([owner, release_file.release, *names, *digests])
    return hashlib.sha256(text.encode()).hexdigest()[:12]
