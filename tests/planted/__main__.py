# SPDX-License-Identifier: Apache-2.0
"""Does the suite notice?  Plants one fault at a time in a copy of this repository and asks the tests.

uv run --extra cpu python tests/planted [--fault NAME] [--engines] [--all]
"""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import typer
from planted_faults import FAULTS, Fault
from rich.console import Console
from rich.table import Table

ROOT = Path(__file__).parents[2]
COPIED = ("vllm_dcp_hybrid", "patches", "tests", "docs", "pyproject.toml", "README.md")
LIMIT_S = 1500
_FAILED = re.compile(r"^(?:FAILED|ERROR) (tests/.+?)(?: - .*)?$", re.MULTILINE)


@dataclass(frozen=True)
class Outcome:
    """What the tests said; `caught_by`: those that failed."""

    caught_by: tuple[str, ...]
    seconds: float
    last_line: str


def ask(place: Path, arguments: Iterable[str]) -> Outcome:
    """Run tests in a copy of the repository."""
    started = time.monotonic()
    command = [sys.executable, "-m", "pytest", "-q", "-rfE", "-p", "no:cacheprovider", *arguments]
    try:
        done = subprocess.run(command, cwd=place, capture_output=True, text=True, timeout=LIMIT_S, check=False)
        text = done.stdout
    except subprocess.TimeoutExpired:
        return Outcome(("no end within the limit",), LIMIT_S, "")
    caught = tuple(dict.fromkeys(_FAILED.findall(text)))
    lines = text.strip().splitlines() or ["no output"]
    if done.returncode not in (0, 1):
        raise RuntimeError(f"pytest ended with {done.returncode}:\n{text[-2000:]}\n{done.stderr[-2000:]}")
    return Outcome(caught, time.monotonic() - started, lines[-1])


def arguments_of(fault: Fault, *, engines: bool, every: bool) -> list[str]:
    """Of pytest: the tests beside the fault, or those that start engines."""
    asked = ["tests/e2e", "--e2e", "-k", fault.engines] if engines else list(fault.tests)
    return asked if every else [*asked, "--maxfail=1"]


def plant(fault: Fault, place: Path) -> None:
    """Make the edit in a copy.

    Raises:
        ValueError: the text is not there exactly once.
    """
    file = place / fault.file
    text = file.read_text("utf-8")
    if text.count(fault.before) != 1:
        raise ValueError(f"{fault.file} has {text.count(fault.before)} places for {fault.name!r}, not one")
    file.write_text(text.replace(fault.before, fault.after), "utf-8")


def copy_to(place: Path) -> None:
    """The parts of the repository that tests read."""
    for name in COPIED:
        source = ROOT / name
        if source.is_dir():
            shutil.copytree(source, place / name, ignore=shutil.ignore_patterns("__pycache__"))
        else:
            shutil.copyfile(source, place / name)


def main(
    fault: Annotated[str, typer.Option(help="Only faults whose names contain this.")] = "",
    engines: Annotated[bool, typer.Option(help="Ask tests that start real engines: minutes for each fault.")] = False,
    every: Annotated[bool, typer.Option("--all", help="Name every test that notices, not the first alone.")] = False,
) -> None:
    """Exit status: 0 every fault was noticed, and nothing without one; 1 otherwise."""
    console = Console(width=None if sys.stdout.isatty() else 160)
    chosen = [each for each in FAULTS if fault in each.name]
    table = Table("planted", "CASES", "noticed by", "took")
    with tempfile.TemporaryDirectory(prefix="dcp-hybrid-planted-") as directory:
        clean = Path(directory) / "clean"
        copy_to(clean)
        asked = dict.fromkeys(test for each in chosen for test in each.tests)
        control = ask(clean, ["tests/e2e", "--e2e", "-k", chosen[0].engines] if engines else asked)
        table.add_row("nothing", "-", ", ".join(control.caught_by) or f"nobody: {control.last_line}", _took(control))
        missed = bool(control.caught_by)
        for number, each in enumerate(chosen):
            place = Path(directory) / str(number)
            copy_to(place)
            plant(each, place)
            outcome = ask(place, arguments_of(each, engines=engines, every=every))
            missed |= not outcome.caught_by
            found = "\n".join(outcome.caught_by[:12]) or f"NOBODY: {outcome.last_line}"
            more = f"\n... {len(outcome.caught_by)} in all" if len(outcome.caught_by) > 12 else ""
            table.add_row(each.name, each.case, found + more, _took(outcome))
            console.print(f"{each.name}: {found.splitlines()[0]}", highlight=False, markup=False)
    console.print(table)
    raise typer.Exit(int(missed))


def _took(outcome: Outcome) -> str:
    return f"{outcome.seconds:.0f} s"


if __name__ == "__main__":
    typer.run(main)
