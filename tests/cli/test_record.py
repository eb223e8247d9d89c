# SPDX-License-Identifier: Apache-2.0
"""`record`: write release files, and find what differs from them."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from vllm_dcp_hybrid import patching
from vllm_dcp_hybrid.cli import record


def test_no_vllm_is_status_2(run: Callable, no_vllm: None) -> None:
    assert run("record").status == 2


def test_written_file_is_equal_to_its_source(run: Callable, recorded_vllm: Path) -> None:
    outcome = run("record", "--check")
    assert outcome.status == 0, outcome.raw
    assert "1 targets" in outcome.text


def test_file_names_the_command_that_made_it(recorded_vllm: Path) -> None:
    release = patching.load_release("9.9.9")
    assert release is not None
    assert release.made_by == "vllm-dcp-hybrid record"


def test_check_without_a_file_is_status_1_and_writes_none(run: Callable, fake_vllm: Path) -> None:
    outcome = run("record", "--check")
    assert outcome.status == 1
    assert "does not exist" in outcome.text
    assert patching.load_release("9.9.9") is None


def test_first_differing_target_is_named(run: Callable, recorded_vllm: Path) -> None:
    (recorded_vllm / "sizes.py").write_text("\n\ndef resolve(config):\n    return 2\n")
    outcome = run("record", "--check")
    assert outcome.status == 1
    assert "the source of vllm.sizes:resolve changed (vllm/sizes.py:3)" in outcome.text


def test_change_outside_of_the_targets_is_named_by_its_file(run: Callable, recorded_vllm: Path) -> None:
    file = recorded_vllm / "sizes.py"
    file.write_text(file.read_text() + "\n\ndef other():\n    pass\n")
    outcome = run("record", "--check")
    assert outcome.status == 1
    assert "vllm/sizes.py changed outside of the targets" in outcome.text


def test_missing_target_is_status_1_and_nothing_is_written(run: Callable, fake_vllm: Path) -> None:
    (fake_vllm / "sizes.py").write_text("")
    outcome = run("record")
    assert outcome.status == 1
    assert "vllm.sizes:resolve" in outcome.text
    assert patching.load_release("9.9.9") is None


def test_release_that_no_patch_claims_is_status_1(
    run: Callable, fake_vllm: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(record, "ALL_PATCHES", ())
    assert run("record").status == 1


def test_other_directory(run: Callable, fake_vllm: Path, tmp_path: Path) -> None:
    directory = tmp_path / "elsewhere"
    assert run("record", "--directory", str(directory)).status == 0
    assert [path.name for path in directory.iterdir()] == ["9.9.9.toml"]
    assert run("record", "--check", "--directory", str(directory)).status == 0


@pytest.mark.contract
def test_committed_file_is_what_the_installed_vllm_gives(run: Callable) -> None:
    outcome = run("record", "--check")
    assert outcome.status == 0, outcome.raw
