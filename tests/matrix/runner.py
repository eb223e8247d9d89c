# SPDX-License-Identifier: Apache-2.0
"""One run over releases: environments one after the other, releases side by side, engines one at a time."""

from __future__ import annotations

import datetime
import shlex
import sys
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import dataclass
from pathlib import Path

import releases as known
from cases import ENGINE_CHECKS
from checks import ENVIRONMENT, FAILED, PASSED, Check, Checker, Python, planned, python_of, python_with_sources
from environments import ROOT, CannotMake, Environment, prepare, remove
from packaging.version import Version
from processes import Processes
from releases import CPU_WHEEL
from results import Origin, ReleaseResult, commit_of, machine
from rich.console import Console
from table import summary

from vllm_dcp_hybrid.cli.sources import SourcesUnavailable, fetch_tree

LOGS = ROOT / ".cache" / "matrix-logs"


@dataclass(frozen=True)
class Options:
    """What to test.

    Attributes:
        releases: of vLLM.
        engines: of `all` of them, of both `ends`, or of `none`.
        engine_checks: names of those that are wanted.
        is_brief: leave out contract tests that say the same everywhere.
        jobs: releases side by side.
        place: where environments lie.
        keep: environments, for the next run.
    """

    releases: tuple[str, ...]
    engines: str = "all"
    engine_checks: tuple[str, ...] = ENGINE_CHECKS
    is_brief: bool = False
    jobs: int = 1
    place: str | None = None
    keep: bool = True


class Runner:
    """Tests releases and collects what came of them."""

    def __init__(self, options: Options, console: Console) -> None:
        self.options = options
        self.console = console
        self.processes = Processes()
        self.origin = Origin(
            date=datetime.datetime.now(datetime.timezone.utc).date().isoformat(),
            command=shlex.join(["python", *sys.argv]),
            commit=commit_of(ROOT),
            machine=machine(),
        )
        self._making = threading.Lock()

    def run(self, take: Callable[[ReleaseResult], None]) -> list[ReleaseResult]:
        """The results, oldest release first; an interrupted run ends what it started.

        Args:
            take: gets each release's result as soon as there is one, in this thread.
        """
        builds = {release: known.build_of(release) for release in self.options.releases}
        with_engines = {*self._with_engines(builds)}
        # Those with engines first: the machine is never left to one long release at the end.
        order = sorted(builds, key=lambda release: (release not in with_engines, Version(release)))
        with ThreadPoolExecutor(self.options.jobs) as pool:
            futures = [pool.submit(self._test, release, builds[release], release in with_engines) for release in order]
            try:
                found = []
                for future in as_completed(futures):
                    found.append(future.result())
                    take(found[-1])
            except BaseException:
                self.processes.stop()
                pool.shutdown(wait=True, cancel_futures=True)
                raise
        return sorted(found, key=lambda result: Version(result.release))

    def _with_engines(self, builds: dict[str, str]) -> list[str]:
        choices: dict[str, Callable[[], list[str]]] = {
            "all": lambda: list(builds),
            "ends": lambda: known.ends(list(builds), builds.__getitem__),
            "none": list,
        }
        return choices[self.options.engines]()

    def _test(self, release: str, build: str, with_engines: bool) -> ReleaseResult:
        names = planned(release, build, self.options.engine_checks if with_engines else ())
        started = time.monotonic()
        try:
            python, versions, environment = self._python(release, build)
        except (CannotMake, SourcesUnavailable) as error:
            made = Check(ENVIRONMENT, FAILED, time.monotonic() - started, {}, str(error))
            self._show(release, made)
            return ReleaseResult(release, build, self.origin, tuple(names), {}, (made,))
        made = Check(ENVIRONMENT, PASSED, time.monotonic() - started)
        self._show(release, made)
        checker = Checker(release, build, python, self.processes, LOGS / release, is_brief=self.options.is_brief)
        try:
            checks = checker.run(names, self._show)
        finally:
            if environment is not None and not self.options.keep:
                remove(environment)
        return ReleaseResult(release, build, self.origin, tuple(names), versions, (made, *checks))

    def _python(self, release: str, build: str) -> tuple[Python, dict[str, str], Environment | None]:
        if build == CPU_WHEEL:
            # uv's cache is filled once, not by several at a time.
            with self._making:
                environment = prepare(release, self.options.place)
            return python_of(environment), environment.versions(), environment
        tree: Path = fetch_tree(release)
        return python_with_sources(tree), {"vllm": f"{release} (sources)"}, None

    def _show(self, release: str, check: Check) -> None:
        style = "" if check.has_passed else "red"
        text = f"{release:8} {check.name:12} {summary(check):24} {check.seconds:6.0f} s"
        self.console.print(text, style=style, markup=False, highlight=False, soft_wrap=True)
