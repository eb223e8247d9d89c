# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import dataclasses
import sys
import time
from typing import Any

import pytest

from vllm_dcp_hybrid.patching import (
    DriftedTarget,
    MissingTarget,
    NameTaken,
    Patch,
    UnknownRelease,
    UnrecordedTarget,
    check,
    missing_replacements,
)


def checked(sandbox: Any, release_file: Any, *patches: Patch, version: str = "1.0") -> list[Any]:
    return check(patches, release_file, sandbox.root, version=version, owner="plugin 7.0")


def edit(sandbox: Any, module: str, old: str, new: str) -> None:
    path = sandbox.root / f"{module}.py"
    text = path.read_text()
    assert old in text
    path.write_text(text.replace(old, new))


def test_the_recorded_source_has_no_problems_and_nothing_is_imported(sandbox: Any) -> None:
    patch = sandbox.patch("ops:double", leans_on=["ops:Runner.run", "ops:FACTOR"])
    assert checked(sandbox, sandbox.record(patch), patch) == []
    assert sandbox.pkg not in sys.modules


def test_a_changed_target_is_named_with_file_line_and_release(sandbox: Any) -> None:
    patch = sandbox.patch("ops:double")
    release_file = sandbox.record(patch)
    edit(sandbox, "ops", "return FACTOR * x", "return x")
    (problem,) = checked(sandbox, release_file, patch)
    assert isinstance(problem, DriftedTarget)
    assert f"{sandbox.pkg}.ops:double at {sandbox.pkg}/ops.py:5" in str(problem)
    assert "recorded for 1.0" in str(problem)


@pytest.mark.parametrize("leaned", ["ops:Base", "ops:Base.inherited", "ops:FACTOR"])
def test_a_change_in_what_a_patch_leans_on_counts(sandbox: Any, leaned: str) -> None:
    patch = sandbox.patch("ops:Runner.run", leans_on=[leaned])
    release_file = sandbox.record(patch)
    edit(sandbox, "ops", "FACTOR = 2", "FACTOR = 3")
    edit(sandbox, "ops", '"stock"', '"new"')
    (problem,) = checked(sandbox, release_file, patch)
    assert isinstance(problem, DriftedTarget)
    assert problem.target.endswith(leaned)


def test_a_change_elsewhere_in_the_file_does_not_count(sandbox: Any) -> None:
    patch = sandbox.patch("ops:double")
    release_file = sandbox.record(patch)
    edit(sandbox, "ops", '"stock"', '"new"')
    edit(sandbox, "ops", "FACTOR = 2", "FACTOR = 2\n\nNEW = 1\n")
    assert checked(sandbox, release_file, patch) == []


def test_a_target_that_was_renamed_is_missing(sandbox: Any) -> None:
    patch = sandbox.patch("ops:double")
    release_file = sandbox.record(patch)
    edit(sandbox, "ops", "def double", "def twice")
    (problem,) = checked(sandbox, release_file, patch)
    assert isinstance(problem, MissingTarget)
    assert f"{sandbox.pkg}/ops.py" in str(problem)


def test_a_module_that_was_removed_is_missing(sandbox: Any) -> None:
    patch = sandbox.patch("lazy:late")
    release_file = sandbox.record(patch)
    (sandbox.root / "lazy.py").unlink()
    (problem,) = checked(sandbox, release_file, patch)
    assert isinstance(problem, MissingTarget)
    assert "does not exist" in str(problem)


def test_an_inherited_method_is_missing(sandbox: Any) -> None:
    with pytest.raises(MissingTarget, match="not inherited"):
        sandbox.record(sandbox.patch("ops:Runner.inherited"))


def test_a_target_that_nobody_recorded_is_a_problem(sandbox: Any) -> None:
    release_file = sandbox.record(sandbox.patch("ops:double"))
    (problem,) = checked(sandbox, release_file, sandbox.patch("ops:Runner.run"))
    assert isinstance(problem, UnrecordedTarget)


def test_a_target_whose_other_names_nobody_recorded_is_a_problem(sandbox: Any) -> None:
    release_file = sandbox.record(sandbox.patch("ops:Runner.run", leans_on=["ops:double"]))
    (problem,) = checked(sandbox, release_file, sandbox.patch("ops:double"))
    assert isinstance(problem, UnrecordedTarget)


def test_a_release_without_a_file_is_unknown(sandbox: Any) -> None:
    patch = sandbox.patch("ops:double")
    (problem,) = checked(sandbox, None, patch)
    assert isinstance(problem, UnknownRelease)
    assert sandbox.pkg in str(problem)
    (problem,) = checked(sandbox, sandbox.record(patch), patch, version="1.0.1")
    assert isinstance(problem, UnknownRelease)
    with pytest.raises(UnknownRelease):
        sandbox.apply(patch, version="1.1", release_file=sandbox.record(patch))


def test_a_local_version_is_the_release_it_was_built_from(sandbox: Any) -> None:
    patch = sandbox.patch("ops:double")
    assert checked(sandbox, sandbox.record(patch), patch, version="1.0+cu130") == []


def test_a_name_to_add_that_appeared_since_is_taken(sandbox: Any) -> None:
    patch = sandbox.patch("ops:extra", "added", how="add")
    release_file = sandbox.record(patch)
    assert checked(sandbox, release_file, patch) == []
    edit(sandbox, "ops", "FACTOR = 2", "FACTOR = 2\ndef extra():\n    return 1\n")
    (problem,) = checked(sandbox, release_file, patch)
    assert isinstance(problem, NameTaken)


def test_a_name_to_add_needs_its_class(sandbox: Any) -> None:
    with pytest.raises(MissingTarget, match="Nobody"):
        sandbox.record(sandbox.patch("ops:Nobody.extra", "added", how="add"))


def test_replacements_that_do_not_exist_are_listed_without_an_import(sandbox: Any) -> None:
    patches = [sandbox.patch("ops:double"), sandbox.patch("ops:Runner.run", "nothing")]
    (problem,) = missing_replacements(patches)
    assert problem.patch == "ops-runner-run"
    assert sandbox.plugin not in sys.modules


@pytest.mark.parametrize("is_whole_file_equal", [True, False])
def test_thirty_targets_in_twelve_files_are_checked_in_thirty_milliseconds(
    sandbox: Any, is_whole_file_equal: bool
) -> None:
    body = "".join(f"def f{i}(a, b=(1, 2)):\n    '''It's {i}.'''\n    return [a, {{b: 'x'}}]\n\n\n" for i in range(100))
    for number in range(12):
        sandbox.write(f"big{number}", body)
    patches = [sandbox.patch(f"big{i % 12}:f{i}") for i in range(30)]
    release_file = sandbox.record(*patches)
    if not is_whole_file_equal:
        release_file = dataclasses.replace(release_file, file_digests={})
    times = []
    for _ in range(5):
        start = time.process_time()
        assert checked(sandbox, release_file, *patches) == []
        times.append(time.process_time() - start)
    assert min(times) < 0.03
