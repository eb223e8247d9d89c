# SPDX-License-Identifier: Apache-2.0
"""docs/support.md is what the committed results give, and says "not tested" where nobody looked."""

from __future__ import annotations

from dataclasses import replace

import support_page
from checks import CONTRACT, DOCTOR, FAILED, PASSED, Check
from environments import ROOT
from releases import CPU_WHEEL, SOURCES, known_releases
from results import Origin, ReleaseResult, read
from support_page import GPUResult, page, read_gpu_results

MATRIX = ROOT / "docs" / "results" / "matrix.json"
ORIGIN = Origin("2026-11-29", "python tests/matrix run", "abc1234", "0.1.0", "2 cores")
CONTRACT_PASSED = Check(CONTRACT, PASSED, 60.0, {"passed": 600, "failed": 0, "skipped": 2})
DOCTOR_PASSED = Check(DOCTOR, PASSED, 1.0, {"status": 0, "patches": 20})
LFM2 = Check(
    "lfm2",
    PASSED,
    90.0,
    {"mean": 2e-6, "largest": 1.4e-5, "hits": [1088, 1632, 2720, 4896], "positions": 3014, "block_size": 272},
)
TESTED = ReleaseResult(
    "0.25.1", CPU_WHEEL, ORIGIN, (CONTRACT, DOCTOR, "lfm2"), {"torch": "2.11.0"}, (CONTRACT_PASSED, DOCTOR_PASSED, LFM2)
)


def row(release: str, *results: ReleaseResult, gpu: tuple[GPUResult, ...] = ()) -> list[str]:
    """The cells of a release in the table of features."""
    text = page([release], results, gpu).partition("## Release by feature")[2].partition("## ")[0]
    (line,) = [line for line in text.splitlines() if line.startswith(f"| {release} ")]
    return [cell.strip() for cell in line.strip("|").split("|")]


def test_a_feature_says_what_it_was_tested_by() -> None:
    cells = row("0.25.1", TESTED, gpu=(GPUResult("0.25.1", "LFM2 on two H200s", "two.md"),))
    assert "600 passed, 20 patches" in cells
    assert "differs by 2e-06 / 1e-05" in cells
    assert "1,088 / 1,632 / 2,720 / 4,896 (block 272)" in cells
    assert "[LFM2 on two H200s](results/two.md)" in cells


def test_a_release_that_nobody_tested_says_so_in_every_column() -> None:
    cells = row("0.32.0")
    assert cells.count(support_page.NOT_TESTED) == len(cells) - 2  # its name, and whose path it has


def test_a_failure_is_not_hidden() -> None:
    failed = replace(TESTED, checks=(CONTRACT_PASSED, replace(DOCTOR_PASSED, verdict=FAILED)))
    assert row("0.25.1", failed)[2] == "**failed**"


def test_sources_alone_are_named_as_such() -> None:
    cells = row("0.33.0", replace(TESTED, release="0.33.0", build=SOURCES, checks=(CONTRACT_PASSED, DOCTOR_PASSED)))
    assert "600 passed on sources, 20 patches" in cells
    assert "not tested: no CPU wheel" in cells


def test_a_model_that_a_release_cannot_run_is_not_called_untested() -> None:
    assert "not there (`>=0.21`)" in row("0.20.2", replace(TESTED, release="0.20.2"))


def test_the_hits_are_those_of_the_first_model_that_ran() -> None:
    numbers = {**LFM2.numbers, "hits": [1280, 1536, 2816, 4864], "block_size": 128}
    other = replace(LFM2, name="qwen3-next", numbers=numbers)
    both, one = (replace(TESTED, checks=(CONTRACT_PASSED, *checks)) for checks in ((LFM2, other), (other,)))
    assert "1,088 / 1,632 / 2,720 / 4,896 (block 272)" in row("0.25.1", both)
    assert "1,280 / 1,536 / 2,816 / 4,864 (block 128)" in row("0.25.1", one)


def test_the_committed_page_is_what_the_committed_results_give() -> None:
    expected = page(known_releases(), read(MATRIX), read_gpu_results())
    assert (ROOT / "docs" / "support.md").read_text("utf-8") == expected, "run `python tests/matrix page`"


def test_every_page_of_gpu_results_exists() -> None:
    assert all((ROOT / "docs" / "results" / each.page).is_file() for each in read_gpu_results())


def test_every_release_file_has_results_in_which_nothing_failed_or_is_missing() -> None:
    results = {result.release: result for result in read(MATRIX)}
    assert sorted(results) == sorted(known_releases())
    assert [text for result in results.values() for text in result.problems()] == []
