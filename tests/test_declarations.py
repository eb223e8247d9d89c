# SPDX-License-Identifier: Apache-2.0
"""The declarations meet the source of every release that has a file.  Nothing of vLLM is imported here.

Sources are those that `vllm-dcp-hybrid record` keeps, the installed vLLM, and `--vllm-source DIR`.
"""

from __future__ import annotations

import ast
import functools
from dataclasses import replace
from pathlib import Path

import pytest
from source_edits import EditedTree, definitions, parse, source_of, with_added, with_changed_lines, with_renamed

from vllm_dcp_hybrid import patching, plugin
from vllm_dcp_hybrid.cli import sources
from vllm_dcp_hybrid.cli.installed import find_vllm
from vllm_dcp_hybrid.cli.record import differences, moves
from vllm_dcp_hybrid.declarations import ALL_PATCHES, ENTRY_PATCHES, ERAS, FEATURE_PATCHES, era_of
from vllm_dcp_hybrid.patching import Patch, ReleaseFile, SourceTree, known_releases
from vllm_dcp_hybrid.patching.patch import check_unique, split_name
from vllm_dcp_hybrid.patching.release_file import fingerprinted

contract = pytest.mark.contract


@functools.cache
def selected(release: str) -> tuple[Patch, ...]:
    return patching.select(ALL_PATCHES, release)


@functools.cache
def release_file(release: str) -> ReleaseFile:
    found = patching.load_release(release)
    assert found is not None, f"no release file for vLLM {release}"
    return found


@functools.cache
def source_tree(root: Path) -> SourceTree:
    return SourceTree(root)


def targets_of(release: str) -> list[str]:
    return sorted({target for patch in selected(release) for target in fingerprinted(patch)})


def added_to(release: str) -> list[Patch]:
    return [patch for patch in selected(release) if patch.how == "add"]


def check(release: str, root: Path, tree: SourceTree) -> list[str]:
    """What `patching.check` says of source, as sentences."""
    problems = patching.check(
        selected(release), release_file(release), root, version=release, owner=plugin.OWNER, tree=tree
    )
    # Modules that another test has loaded are not those of this tree.
    return [str(problem) for problem in problems if not isinstance(problem, patching.ForeignPatch)]


def texts_by_module(root: Path, targets: list[str]) -> dict[str, tuple[str, list[tuple[str, ...]]]]:
    """By module, its text and the paths of those of `targets` that lie in it."""
    found: dict[str, tuple[str, list[tuple[str, ...]]]] = {}
    for target in targets:
        name = split_name(target)
        text = source_tree(root).read(name.module).decode()
        found.setdefault(name.module, (text, []))[1].append(name.path)
    return found


@contract
def test_every_target_and_everything_leaned_on_is_the_recorded_source(release: str, release_root: Path) -> None:
    assert check(release, release_root, source_tree(release_root)) == []


@contract
def test_the_release_file_is_what_record_writes(release: str, release_root: Path) -> None:
    """Targets, signatures, digests and other bindings; for the sources it was made from, also files and lines."""
    fresh = patching.record(ALL_PATCHES, release_root, release=release, made_by=release_file(release).made_by)
    assert list(differences(release_file(release), fresh)) == []
    if release_root == sources.cached_tree(release):
        assert list(moves(release_file(release), fresh)) == []


@contract
def test_what_is_fingerprinted_is_the_whole_definition(release: str, release_root: Path) -> None:
    """By the syntax tree: from the first decorator to the last line, of every definition of the name."""
    tree = source_tree(release_root)
    for target in targets_of(release):
        name = split_name(target)
        text = tree.read(name.module).decode()
        nodes = definitions(text, name.path)
        block = tree.block(target)
        if not block.is_generated:
            assert block.text == "\n".join(source_of(text, node) for node in nodes), target
            assert block.line == nodes[-1].lineno, target


@contract
def test_every_recorded_binding_is_made_whenever_its_module_is_imported(release: str, release_root: Path) -> None:
    """The mechanism refuses a module that lacks one, so none may hang on an `if` or a `try`."""
    for target, names in release_file(release).bindings.items():
        for text in names:
            module, _, local = text.partition(":")
            imports = [
                alias.asname or alias.name
                for node in parse(source_tree(release_root).read(module).decode()).body
                if isinstance(node, ast.ImportFrom)
                for alias in node.names
            ]
            assert local in imports, f"{text} of {target}"


@contract
def test_case_28_one_changed_line_in_any_target_is_found_and_named(release: str, release_root: Path) -> None:
    """CASES 28: a patch that no longer matches is refused, by name, not logged and forgotten."""
    changed = {
        module: with_changed_lines(text, paths)
        for module, (text, paths) in texts_by_module(release_root, targets_of(release)).items()
    }
    problems = check(release, release_root, EditedTree(release_root, changed))
    for patch in selected(release):
        for target in fingerprinted(patch):
            assert any(text.startswith(f"{target} at ") and f"'{patch.name}'" in text for text in problems), target


@contract
def test_case_28_one_changed_line_alone_is_enough() -> None:
    """CASES 28: of the installed release, each target by itself; no other patch than its users complains."""
    vllm = find_vllm()
    assert vllm is not None
    release, root = patching.public_version(vllm.version), vllm.root
    for target in targets_of(release):
        name = split_name(target)
        text = source_tree(root).read(name.module).decode()
        problems = check(release, root, EditedTree(root, {name.module: with_changed_lines(text, [name.path])}))
        users = [patch.name for patch in selected(release) if target in fingerprinted(patch)]
        named = [problem for problem in problems if problem.startswith(f"{target} at ")]
        assert len(named) == len(users) > 0, target
        # A class that holds the target, or a class of which a method is one too, has changed with it.
        related = [
            other for other in targets_of(release) if other.startswith(f"{target}.") or target.startswith(f"{other}.")
        ]
        assert all(
            problem.startswith((f"{target} at ", *(f"{other} at " for other in related))) for problem in problems
        )


@contract
def test_case_28_a_target_that_is_gone_is_found_and_named(release: str, release_root: Path) -> None:
    """CASES 28, renamed upstream."""
    changed = {
        module: with_renamed(text, paths)
        for module, (text, paths) in texts_by_module(release_root, targets_of(release)).items()
    }
    problems = check(release, release_root, EditedTree(release_root, changed))
    for patch in selected(release):
        for target in fingerprinted(patch):
            expected = f"{target}, which patch '{patch.name}' needs, is not defined in "
            assert any(text.startswith(expected) for text in problems), target


@contract
def test_a_name_that_vllm_has_meanwhile_is_not_added_over(release: str, release_root: Path) -> None:
    for patch in added_to(release):
        name = split_name(patch.target)
        text = source_tree(release_root).read(name.module).decode()
        tree = EditedTree(release_root, {name.module: with_added(text, name.path)})
        problems = check(release, release_root, tree)
        assert any(patch.target in text and "is already defined in" in text for text in problems), problems


@pytest.mark.parametrize("version", known_releases())
def test_no_patch_has_outlived_its_until(version: str) -> None:
    assert patching.expired(ALL_PATCHES, version) == ()


def test_an_until_that_is_due_is_noticed() -> None:
    due = replace(FEATURE_PATCHES[1], releases=">=0.25.1", until="0.26.0")
    assert patching.expired([due], "0.25.1") == ()
    assert patching.expired([due], "0.26.0") == (due,)


def test_every_replacement_exists() -> None:
    assert patching.missing_replacements(ALL_PATCHES) == []


@pytest.mark.parametrize("version", known_releases())
def test_the_list_for_a_release_does_not_contradict_itself(version: str) -> None:
    check_unique(selected(version), "vllm")
    assert patching.select(ENTRY_PATCHES, version)
    assert patching.select(FEATURE_PATCHES, version)


def test_the_list_is_entry_then_feature() -> None:
    assert ALL_PATCHES == ENTRY_PATCHES + FEATURE_PATCHES


@pytest.mark.parametrize("patch", ALL_PATCHES, ids=lambda patch: f"{patch.name} {patch.releases}")
def test_every_patch_is_for_a_known_release(patch: Patch) -> None:
    assert any(patch.claims(release) for release in known_releases())


@pytest.mark.parametrize("version", known_releases())
def test_every_known_release_lies_in_one_era(version: str) -> None:
    assert [era for era in ERAS if patching.is_among(version, era.releases)] == [era_of(version)]


@pytest.mark.parametrize("version", ["0.19.1", "0.20.1"])
def test_a_release_that_no_patch_claims_lies_in_no_era(version: str) -> None:
    assert selected(version) == ()
    assert era_of(version) is None


def test_a_release_to_come_is_claimed_and_unknown_until_it_has_a_file() -> None:
    assert selected("99.0")
    assert era_of("99.0") is ERAS[-1]
    assert patching.load_release("99.0") is None


def test_every_patch_names_the_processes_that_need_it() -> None:
    known = {"api_server", "engine_core", "worker"}
    for patch in ALL_PATCHES:
        assert patch.processes, patch.name
        assert set(patch.processes) <= known, patch.name


def test_the_entry_patches_touch_the_command_line_and_the_configuration_only() -> None:
    """They are applied although the rest may not be: then they may only be able to say why."""
    assert {split_name(patch.target).module for patch in ENTRY_PATCHES} == {"vllm.engine.arg_utils"}
