# SPDX-License-Identifier: Apache-2.0
"""A reviewer is shown every difference in patched code between two releases, and nothing else."""

from __future__ import annotations

from pathlib import Path

import changes
import pytest
from changes import Change

from vllm_dcp_hybrid.patching import Patch

PATCHES = (
    Patch(
        name="a-wrap",
        target="vllm.core:Scheduler.split",
        how="wrap",
        replacement="ours:split",
        leans_on=("vllm.core:helper",),
        processes=("engine_core",),
        releases=">=1",
        why="w",
        until="u",
    ),
    Patch(
        name="an-add",
        target="vllm.core:extra",
        how="add",
        replacement="ours:extra",
        processes=("worker",),
        releases=">=2",
        why="w",
        until="u",
    ),
)
CORE = """\
class Scheduler:
    def split(self, n):
        return n

def helper():
    return 1

def other():
    pass
"""


def tree(directory: Path, core: str, user: str = "") -> Path:
    root = directory / "vllm"
    root.mkdir(parents=True)
    for name, text in (("__init__", ""), ("core", core), ("user", user)):
        (root / f"{name}.py").write_text(text)
    return root


def found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, new: str, user: str = "") -> list[Change]:
    monkeypatch.setattr(changes, "ALL_PATCHES", PATCHES)
    return list(changes.changes("1.0", tree(tmp_path / "1", CORE), "2.0", tree(tmp_path / "2", new, user)))


def test_equal_targets_are_not_shown(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert found(tmp_path, monkeypatch, CORE.replace("    pass", "    return 5")) == []


def test_a_changed_target_is_shown_with_the_patches_that_use_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (change,) = found(tmp_path, monkeypatch, CORE.replace("return 1", "return 2"))
    assert (change.target, change.patches) == ("vllm.core:helper", ("a-wrap",))
    assert {"-    return 1", "+    return 2"} < set(change.lines)


def test_a_target_that_has_gone_is_shown_whole(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (change,) = found(tmp_path, monkeypatch, CORE.replace("def split", "def cut"))
    assert change.target == "vllm.core:Scheduler.split"
    assert not any(line.startswith("+ ") for line in change.lines)


def test_a_name_that_the_newer_release_brings_itself_is_shown(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (change,) = found(tmp_path, monkeypatch, CORE + "\ndef extra():\n    return 3\n")
    assert change.patches == ("an-add",)


def test_a_new_copy_of_a_target_is_shown(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    module_level = (Patch(**{**vars(PATCHES[0]), "target": "vllm.core:helper", "leans_on": ()}),)
    monkeypatch.setattr(changes, "ALL_PATCHES", module_level)
    old, new = tree(tmp_path / "1", CORE), tree(tmp_path / "2", CORE, "from vllm.core import helper as h\n")
    (change,) = changes.changes("1.0", old, "2.0", new)
    assert change.lines == ("+ also bound to vllm.user:h",)
