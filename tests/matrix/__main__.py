# SPDX-License-Identifier: Apache-2.0
"""The matrix: every release in an environment of its own, its contract tests, real engines, one table.

uv run --extra cpu python tests/matrix run [--releases 0.25.1,0.32.0] [--engines all|ends|none] [--record]
uv run --extra cpu python tests/matrix take RESULTS.json...
uv run --extra cpu python tests/matrix page [--check]
uv run --extra cpu python tests/matrix changes 0.32.0 0.33.0
"""

from __future__ import annotations

import signal
import sys
from enum import Enum
from pathlib import Path
from types import FrameType
from typing import Annotated

import typer
from rich.console import Console

sys.path.append(str(Path(__file__).parents[1] / "e2e"))

import changes as differences
import releases as known
import results
import support_page
from cases import ENGINE_CHECKS
from environments import PLACE, ROOT
from runner import Options, Runner
from table import results_table

from vllm_dcp_hybrid.cli.sources import SourcesUnavailable, fetch_tree

RECORD = ROOT / "docs" / "results" / "matrix.json"
PAGE = ROOT / "docs" / "support.md"

app = typer.Typer(no_args_is_help=True, add_completion=False, help="Tests every supported vLLM release.")


class Engines(str, Enum):
    """Of which releases engines are started."""

    all = "all"
    ends = "ends"
    none = "none"


@app.command(epilog="Exit status: 0 all passed; 1 something failed, or did not run although it should have.")
def run(
    releases: Annotated[str, typer.Option(help="Comma-separated; all with a file in patches/ if not given.")] = "",
    engines: Annotated[
        Engines, typer.Option(help="Start engines of all releases, of the oldest and the newest, or of none.")
    ] = Engines.all,
    cases: Annotated[str, typer.Option(help=f"Of engines, comma-separated: {', '.join(ENGINE_CHECKS)}.")] = "",
    is_brief: Annotated[
        bool, typer.Option("--brief", help="Leave out the contract tests that say the same everywhere.")
    ] = False,
    jobs: Annotated[int, typer.Option(min=1, help="Releases tested side by side; engines never are.")] = 1,
    place: Annotated[
        str, typer.Option("--environments", envvar=PLACE, help="Where environments lie; {release} may occur in it.")
    ] = "",
    keep: Annotated[bool, typer.Option(help="Keep environments for the next run: 1 GB each.")] = True,
    out: Annotated[Path | None, typer.Option("--json", help="Write the results to this file.")] = None,
    record: Annotated[
        bool, typer.Option("--record", help="Take the results into docs/results/matrix.json and docs/support.md.")
    ] = False,
) -> None:
    """Make an environment per release, run its contract tests and engines, print a table."""
    # Where nobody watches, the table needs no line breaks.
    console = Console(width=None if sys.stdout.isatty() else 160)
    try:
        chosen = known.choose([name for name in releases.split(",") if name], known.known_releases())
    except ValueError as error:
        raise typer.BadParameter(str(error), param_hint="--releases") from error
    wanted = tuple(name for name in cases.split(",") if name) or ENGINE_CHECKS
    if not {*wanted} <= {*ENGINE_CHECKS}:
        raise typer.BadParameter(f"there are {', '.join(ENGINE_CHECKS)}", param_hint="--cases")
    options = Options(
        releases=tuple(chosen),
        engines=engines.value,
        engine_checks=wanted,
        is_brief=is_brief,
        jobs=jobs,
        place=place or None,
        keep=keep,
    )
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, interrupt)
    so_far: list[results.ReleaseResult] = []

    def take(result: results.ReleaseResult) -> None:
        """Hours may pass until the last release has its result."""
        so_far.append(result)
        if out is not None:
            out.parent.mkdir(parents=True, exist_ok=True)
            out.write_text(results.to_json(so_far), "utf-8")
        if record:
            take_into_record([result])

    try:
        found = Runner(options, console).run(take)
    except known.IndexUnreachable as error:
        console.print(str(error), style="red", markup=False)
        raise typer.Exit(1) from error
    console.print(results_table(found))
    wrong = results.problems(found, chosen)
    for text in wrong:
        console.print(text, style="red", markup=False, highlight=False, soft_wrap=True)
    console.print(f"{len(chosen)} releases, {len(wrong)} problems", style="red" if wrong else "green")
    raise typer.Exit(1 if wrong else 0)


@app.command("take")
def take_files(
    files: Annotated[list[Path], typer.Argument(exists=True, dir_okay=False, help="What --json wrote.")],
) -> None:
    """Take the results of other runs into docs/results/matrix.json and docs/support.md, as --record does."""
    take_into_record([result for file in files for result in results.from_json(file.read_text("utf-8"))])


@app.command(epilog="Exit status: 0 written or equal, 1 different.")
def page(
    check: Annotated[bool, typer.Option("--check", help="Write nothing; say whether the page is up to date.")] = False,
) -> None:
    """Write docs/support.md from docs/results/matrix.json."""
    if not check:
        write_page()
    elif PAGE.read_text("utf-8") != current_page():
        typer.echo(f"{PAGE} is not what docs/results/ gives: run `python tests/matrix page`", err=True)
        raise typer.Exit(1)


@app.command(epilog="Exit status: 0 shown, 1 the sources cannot be had.")
def changes(
    old: Annotated[str, typer.Argument(help="The release before.")],
    new: Annotated[str, typer.Argument(help="The release to look at.")],
) -> None:
    """Show how the code that patches change or lean on differs between two releases."""
    console = Console()
    try:
        roots = [fetch_tree(release) for release in (old, new)]
    except SourcesUnavailable as error:
        console.print(str(error), style="red", markup=False, soft_wrap=True)
        raise typer.Exit(1) from error
    found = list(differences.changes(old, roots[0], new, roots[1]))
    for change in found:
        console.print(f"\n{change.target}, for {', '.join(change.patches)}", style="bold", markup=False, soft_wrap=True)
        for line in change.lines:
            style = {"-": "red", "+": "green"}.get(line[:1], "")
            console.print(line, style=style, markup=False, highlight=False, soft_wrap=True)
    console.print(f"\n{len(found)} differences between {old} and {new}", highlight=False)


def interrupt(number: int, frame: FrameType | None) -> None:
    """Ends a run through every `finally`, also where it was started in the background."""
    raise KeyboardInterrupt


def current_page() -> str:
    """The page that the committed results give."""
    return support_page.page(known.known_releases(), results.read(RECORD), support_page.read_gpu_results())


def take_into_record(found: list[results.ReleaseResult]) -> None:
    """Releases' results in place of those before them, and the page with them."""
    merged = results.merge(results.read(RECORD), found, known.known_releases())
    RECORD.write_text(results.to_json(merged), "utf-8")
    write_page()


def write_page() -> None:
    PAGE.write_text(current_page(), "utf-8")


if __name__ == "__main__":
    app()
