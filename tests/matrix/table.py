# SPDX-License-Identifier: Apache-2.0
"""Results as a table for the terminal."""

from __future__ import annotations

from collections.abc import Sequence

from cases import CASES, REFUSAL
from checks import CONTRACT, DOCTOR, ENVIRONMENT, Check
from results import ReleaseResult
from rich.table import Table
from rich.text import Text

NOT_PLANNED = "-"
COLUMNS = (CONTRACT, DOCTOR, REFUSAL, *(case.name for case in CASES))


def summary(check: Check) -> str:
    """A check in a few words: its main number, or that it failed."""
    if not check.has_passed:
        return check.verdict
    numbers = check.numbers
    if check.name == CONTRACT:
        skipped = f", {numbers['skipped']} skipped" if numbers.get("skipped") else ""
        return f"{numbers['passed']} passed{skipped}"
    if check.name == DOCTOR:
        return f"{numbers['patches']} patches"
    if "mean" in numbers:
        return f"{numbers['mean']:.1g} / {numbers['largest']:.1g}"
    return "as stock" if check.name == REFUSAL else check.verdict


def cell(result: ReleaseResult, name: str) -> Text:
    """One check of one release."""
    check = result.check(name)
    if check is None:
        return Text("did not run", "red") if name in result.planned else Text(NOT_PLANNED, "dim")
    return Text(summary(check), "green" if check.has_passed else "bold red")


def results_table(results: Sequence[ReleaseResult]) -> Table:
    """Releases down, checks across."""
    table = Table(title="Releases", caption="Engines: mean / largest difference in log-probability, DCP 2 - DCP 1.")
    table.add_column("vLLM", style="bold", no_wrap=True)
    table.add_column("tested with")
    for name in COLUMNS:
        table.add_column(name)
    table.add_column("seconds", justify="right")
    for result in results:
        made = result.check(ENVIRONMENT)
        build = Text("no environment", "bold red") if made is not None and not made.has_passed else Text(result.build)
        cells = [cell(result, name) for name in COLUMNS]
        table.add_row(result.release, build, *cells, f"{result.seconds:,.0f}")
    return table
