# SPDX-License-Identifier: Apache-2.0
"""Verdicts: what is green, and what only looks like it."""

from __future__ import annotations

import json
from pathlib import Path

import checks
import pytest
from cases import ENGINE_CHECKS, REFUSAL
from checks import (
    CONTRACT,
    DOCTOR,
    FAILED,
    PASSED,
    Checker,
    Python,
    judge_contract,
    judge_doctor,
    judge_engine,
    planned,
    read_junit,
)
from environments import ROOT
from processes import TIMED_OUT, Finished, Processes
from releases import CPU_WHEEL, SOURCES


def report(*children: str) -> str:
    cases = "".join(f'<testcase classname="a" name="b">{child}</testcase>' for child in children)
    return f'<?xml version="1.0"?><testsuites><testsuite name="pytest">{cases}</testsuite></testsuites>'


PASS, FAIL, ERROR, SKIP = "", "<failure/>", "<error/>", "<skipped/>"


def test_a_report_is_counted_by_what_came_of_each_test() -> None:
    assert read_junit(report(PASS, PASS, FAIL, ERROR, SKIP)) == {"passed": 2, "failed": 2, "skipped": 1}


def test_contract_tests_that_pass_are_green_with_their_counts() -> None:
    check = judge_contract(Finished(0, "", 3.0), report(PASS, SKIP))
    assert (check.verdict, check.numbers["passed"], check.seconds) == (PASSED, 1, 3.0)


@pytest.mark.parametrize(
    ("code", "children"),
    [
        pytest.param(5, (), id="no-test-collected"),
        pytest.param(0, (), id="an-empty-report"),
        pytest.param(0, (SKIP, SKIP), id="all-skipped"),
        pytest.param(1, (PASS, FAIL), id="a-failure"),
        pytest.param(0, (PASS, ERROR), id="an-error-and-status-0"),
        pytest.param(2, (PASS,), id="interrupted"),
        pytest.param(TIMED_OUT, (PASS,), id="too-slow"),
        pytest.param(0, None, id="no-report"),
    ],
)
def test_anything_less_is_a_failure(code: int, children: tuple[str, ...] | None) -> None:
    check = judge_contract(Finished(code, "words", 1.0), None if children is None else report(*children))
    assert check.verdict == FAILED
    assert check.detail


PATCHES = [{"state": "applies"}, {"state": "for another release"}, {"state": "applies"}]


def doctor(**changes: object) -> str:
    return "a warning\n" + json.dumps({"would_be_applied": True, "reasons": [], "patches": PATCHES, **changes})


def test_a_doctor_that_is_content_is_green() -> None:
    check = judge_doctor(Finished(0, doctor(), 1.0))
    assert (check.verdict, check.numbers) == (PASSED, {"status": 0, "patches": 2})


@pytest.mark.parametrize(
    "done",
    [
        Finished(1, doctor(would_be_applied=False, reasons=["drifted"]), 1.0),
        Finished(0, doctor(would_be_applied=False), 1.0),
        Finished(0, doctor(patches=PATCHES[1:2]), 1.0),
        Finished(1, doctor(), 1.0),
        Finished(0, "Traceback", 1.0),
    ],
)
def test_a_doctor_that_is_not_is_red(done: Finished) -> None:
    assert judge_doctor(done).verdict == FAILED


def test_a_case_has_the_verdict_that_its_process_wrote() -> None:
    answer = json.dumps({"verdict": FAILED, "numbers": {"mean": 1.0}, "detail": "too far apart"})
    check = judge_engine("lfm2", Finished(0, "", 2.0), answer)
    assert (check.verdict, check.numbers, check.detail) == (FAILED, {"mean": 1.0}, "too far apart")


def test_a_case_without_an_answer_has_failed() -> None:
    assert judge_engine("lfm2", Finished(0, "", 2.0), None).verdict == FAILED
    passed = json.dumps({"verdict": PASSED, "numbers": {}, "detail": ""})
    assert judge_engine("lfm2", Finished(TIMED_OUT, "", 2.0), passed).verdict == FAILED


def test_engines_are_planned_where_there_is_a_wheel_to_start() -> None:
    assert planned("0.32.0", CPU_WHEEL, ENGINE_CHECKS) == [CONTRACT, DOCTOR, *ENGINE_CHECKS]
    assert planned("0.32.0", SOURCES, ENGINE_CHECKS) == [CONTRACT, DOCTOR]
    assert planned("0.32.0", CPU_WHEEL, ()) == [CONTRACT, DOCTOR]


def test_only_wanted_cases_that_the_release_can_run_are_planned() -> None:
    assert planned("0.32.0", CPU_WHEEL, (REFUSAL, "lfm2")) == [CONTRACT, DOCTOR, REFUSAL, "lfm2"]
    assert planned("0.20.2", CPU_WHEEL, ("lfm2", "qwen3-next")) == [CONTRACT, DOCTOR, "lfm2"]


def test_what_a_brief_run_leaves_out_exists() -> None:
    for each in (*checks.SAME_EVERYWHERE, *checks.OF_SOURCES):
        path, _, test = each.partition("::")
        assert (ROOT / path).is_file(), path
        assert f"def {test}(" in (ROOT / path).read_text() if test else True


def test_every_check_is_shown_as_it_ends(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With a stand-in for the interpreter: no check can pass, and none stops the others."""
    checker = Checker(
        "9.9", CPU_WHEEL, Python(Path("/bin/true"), tmp_path), Processes(), tmp_path / "logs", is_brief=True
    )
    monkeypatch.setenv("DCP_ENGINE_LOCK", str(tmp_path / "lock"))
    shown: list[str] = []
    found = checker.run([CONTRACT, DOCTOR, "lfm2"], lambda release, check: shown.append(f"{release} {check.name}"))
    assert shown == ["9.9 contract", "9.9 doctor", "9.9 lfm2"]
    assert [check.verdict for check in found] == [FAILED] * 3
