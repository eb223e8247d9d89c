# SPDX-License-Identifier: Apache-2.0
"""The checks of one release, each with a verdict, numbers and seconds."""

from __future__ import annotations

import json
import os
import sys
import xml.etree.ElementTree as ET
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from cases import REFUSAL, cases_for
from environments import ROOT, Environment, child_environment
from processes import TIMED_OUT, Finished, Processes, engine_lock
from releases import CPU_WHEEL

from vllm_dcp_hybrid.cli.diagnosis import APPLIES

PASSED, FAILED = "passed", "failed"
CONTRACT, DOCTOR, ENVIRONMENT = "contract", "doctor", "environment"
_CONTRACT_LIMIT_S = 1200
_DOCTOR_LIMIT_S = 120
_ENGINE_LIMIT_S = float(os.environ.get("DCP_TEST_ENGINE_LIMIT_S", "420"))
_DETAIL = 4000

# Contract tests that say the same with every release: of the tiny models, and of the mechanism at large.
SAME_EVERYWHERE = (
    "tests/test_tiny_models.py",
    "tests/patching/test_modified_vllm.py",
    "tests/patching/test_stock_vllm.py::test_no_function_of_stock_vllm_is_taken_for_a_foreign_patch",
    # They start vLLM anew to see what this package says.
    "tests/test_plugin.py::test_an_unknown_release_gets_one_warning_and_no_patch",
    "tests/test_plugin.py::test_the_python_api_demands_the_plugin_as_the_readme_says",
    # Planted in vLLM's scheduler, to see that the test of it notices.
    "tests/core/test_random_schedules.py::test_a_planted_fault_is_found",
    "tests/engine/test_cli_flag.py::test_case_30_left_out_by_vllm_plugins_the_command_line_itself_is_refused",
)
# Brief runs try few of the random schedules.
FEWER_EXAMPLES = {"DCP_HYBRID_MACHINE": "0.05"}
# Contract tests that import nothing of vLLM: all that can be asked of bare sources.
OF_SOURCES = ("tests/test_declarations.py",)


@dataclass(frozen=True)
class Check:
    """What came of one check."""

    name: str
    verdict: str
    seconds: float
    numbers: dict[str, Any] = field(default_factory=dict)
    detail: str = ""

    @property
    def has_passed(self) -> bool:
        return self.verdict == PASSED


def planned(release: str, build: str, engine_checks: Sequence[str]) -> list[str]:
    """The names of all checks that a release must pass in this run, in their order.

    Args:
        release: of vLLM.
        build: what it is tested with.
        engine_checks: those that are wanted; none where no engine is to be started.
    """
    possible = [REFUSAL, *(case.name for case in cases_for(release))] if build == CPU_WHEEL else []
    return [CONTRACT, DOCTOR, *(name for name in possible if name in engine_checks)]


def read_junit(text: str) -> dict[str, int]:
    """Counts of a JUnit report."""
    counts = {"passed": 0, "failed": 0, "skipped": 0}
    for case in ET.fromstring(text).iter("testcase"):
        kinds = {child.tag for child in case}
        if kinds & {"failure", "error"}:
            counts["failed"] += 1
        elif "skipped" in kinds:
            counts["skipped"] += 1
        else:
            counts["passed"] += 1
    return counts


def judge_contract(done: Finished, report: str | None) -> Check:
    """A run of pytest: green only with its report, exit status 0, no failure and at least one test that passed."""
    counts = read_junit(report) if report else {}
    wrong = ""
    if done.code == TIMED_OUT:
        wrong = f"ran past its limit:\n{done.output[-_DETAIL:]}"
    elif not counts or done.code != 0 or counts["failed"]:
        wrong = f"pytest ended with {done.code}:\n{done.output[-_DETAIL:]}"
    elif not counts["passed"]:
        wrong = "no test ran"
    return Check(CONTRACT, FAILED if wrong else PASSED, done.seconds, counts, wrong)


def judge_doctor(done: Finished) -> Check:
    """`doctor --json`: exit status 0, and it says that the patches would be applied."""
    try:
        found = json.loads(done.output[done.output.index("{") :])
    except ValueError:
        return Check(DOCTOR, FAILED, done.seconds, {}, f"no JSON: {done.output[-_DETAIL:]}")
    num_applied = sum(patch["state"] == APPLIES for patch in found.get("patches", []))
    numbers = {"status": done.code, "patches": num_applied}
    if done.code or not found.get("would_be_applied") or not num_applied:
        return Check(DOCTOR, FAILED, done.seconds, numbers, " ".join(found.get("reasons", [])) or "no patch")
    return Check(DOCTOR, PASSED, done.seconds, numbers)


def judge_engine(name: str, done: Finished, answer: str | None) -> Check:
    """A case: its own verdict, or a failure where it left none."""
    if answer is None or done.code:
        return Check(name, FAILED, done.seconds, {}, f"ended with {done.code}: {done.output[-_DETAIL:]}")
    found = json.loads(answer)
    return Check(name, found["verdict"], done.seconds, found["numbers"], found["detail"][-_DETAIL:])


@dataclass(frozen=True)
class Python:
    """An interpreter, the directory `vllm` to test, and the variables with which the one finds the other."""

    executable: Path
    vllm: Path
    variables: tuple[tuple[str, str], ...] = ()


def python_of(environment: Environment) -> Python:
    return Python(environment.python, environment.site_packages / "vllm")


def python_with_sources(vllm: Path) -> Python:
    """This interpreter, with sources before its own packages."""
    return Python(Path(sys.executable), vllm, (("PYTHONPATH", str(vllm.parent)),))


class Checker:
    """Runs the checks of one release.

    Args:
        release: of vLLM.
        build: what it is tested with.
        python: to run with.
        processes: to start with.
        directory: for logs and reports.
        is_brief: leave out contract tests that say the same everywhere.
    """

    def __init__(
        self, release: str, build: str, python: Python, processes: Processes, directory: Path, *, is_brief: bool
    ) -> None:
        self.release = release
        self.build = build
        self.python = python
        self.processes = processes
        self.directory = directory
        self.is_brief = is_brief
        directory.mkdir(parents=True, exist_ok=True)

    def run(self, names: Sequence[str], show: Callable[[str, Check], None]) -> list[Check]:
        """Run the named checks, and show each as it ends."""
        results = []
        for name in names:
            check = self._run_one(name)
            results.append(check)
            show(self.release, check)
        return results

    def _run_one(self, name: str) -> Check:
        if name == CONTRACT:
            return self.contract()
        if name == DOCTOR:
            return self.doctor()
        with engine_lock():
            return self.engine(name)

    def contract(self) -> Check:
        report = self.directory / "contract.xml"
        report.unlink(missing_ok=True)
        command = ["-m", "pytest", "-m", "contract", "-q", "-p", "no:cacheprovider", f"--junitxml={report}"]
        # Tests of a release are for this one alone, and for these sources rather than cached ones.
        command += ["--release", self.release, "--require-sources", "--vllm-source", str(self.python.vllm)]
        done = self._start([*command, *self._selection()], "contract", _CONTRACT_LIMIT_S)
        return judge_contract(done, report.read_text() if report.is_file() else None)

    def _selection(self) -> list[str]:
        if self.build != CPU_WHEEL:
            return list(OF_SOURCES)
        if not self.is_brief:
            return ["tests"]
        return ["tests", *(f"--{'deselect' if '::' in each else 'ignore'}={each}" for each in SAME_EVERYWHERE)]

    def doctor(self) -> Check:
        return judge_doctor(
            self._start(["-m", "vllm_dcp_hybrid.cli.main", "doctor", "--json"], DOCTOR, _DOCTOR_LIMIT_S)
        )

    def engine(self, name: str) -> Check:
        """A case in a process of its own: two engines, one after the other."""
        answer = self.directory / f"{name}.json"
        answer.unlink(missing_ok=True)
        script = str(Path(__file__).with_name("probe.py"))
        # Engines have limits of their own, which end first.
        done = self._start([script, name, self.release, str(answer)], name, 2 * _ENGINE_LIMIT_S + 120)
        return judge_engine(name, done, answer.read_text() if answer.is_file() else None)

    def _start(self, arguments: Sequence[str], name: str, limit_s: float) -> Finished:
        return self.processes.run(
            [str(self.python.executable), *arguments],
            log=self.directory / f"{name}.log",
            limit_s=limit_s,
            cwd=ROOT,
            environment=child_environment(self.python.variables) | (FEWER_EXAMPLES if self.is_brief else {}),
        )
