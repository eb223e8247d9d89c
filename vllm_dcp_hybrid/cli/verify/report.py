# SPDX-License-Identifier: Apache-2.0
"""What `verify` says at the end: a table, a sentence, a JSON document."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

from vllm_dcp_hybrid import __version__
from vllm_dcp_hybrid.cli.compare import largest, mean
from vllm_dcp_hybrid.cli.verify.bounds import Judgement, Row, Verdict
from vllm_dcp_hybrid.cli.verify.measure import Measured

FORMAT = 1
_SMALL = 0.0005
_STYLES = {Verdict.RIGHT: "bold green", Verdict.WRONG: "bold red", Verdict.UNCLEAR: "bold yellow"}


@dataclass(frozen=True)
class EngineFacts:
    """What is told of one server.

    Attributes:
        name: for the reader.
        command: its command line.
        seconds_to_start: until it answered.
        seconds_to_answer: all questions.
        kv_tokens: that its log says fit, None where it does not say.
    """

    name: str
    command: str
    seconds_to_start: float
    seconds_to_answer: float
    kv_tokens: int | None


@dataclass(frozen=True)
class Findings:
    """Everything that the report shows.

    Attributes:
        subject: for example "DCP 2 of model X at TP 2".
        whose: whose DCP it was.
        effective_block: tokens of a sequence under one block id of the attention layers.
        dtype: that the engines compute in.
        engines: with DCP, without, and where it was needed another without.
        measured: all rows.
        judgement: the verdict.
        prefix_hits: prompt tokens found in the prefix cache; None where it was off.
        warnings: what could not be done, one sentence each.
    """

    subject: str
    whose: str
    effective_block: int
    dtype: str
    engines: tuple[EngineFacts, ...]
    measured: Measured
    judgement: Judgement
    prefix_hits: int | None
    warnings: tuple[str, ...] = ()


def verdict_sentence(findings: Findings) -> str:
    """One sentence that can stand alone."""
    judgement, rows = findings.judgement, findings.measured.rows
    recall = findings.measured.recall
    everything = [difference for row in rows for difference in row.differences]
    subject = f"{findings.subject} ({findings.whose})"
    if judgement.verdict is Verdict.UNCLEAR:
        return f"UNCLEAR: nothing can be said about {subject}, since {judgement.why_unclear}."
    if judgement.verdict is Verdict.RIGHT:
        return (
            f"RIGHT: {subject} answers as the same engine without DCP: {len(everything):,} log-probabilities differ by "
            f"{shown(mean(everything))} in the mean and {shown(largest(everything))} at most, within rounding."
        )
    if not judgement.outside:
        assert recall is not None
        return f"WRONG: {subject} missed {recall.num_lost} of {recall.num_asked} facts that it finds without DCP."
    worst = max(judgement.outside, key=lambda row: (row.largest, row.mean))
    numbers = (
        "log-probabilities that are not numbers"
        if math.isinf(worst.largest)
        else f"log-probabilities differ by {shown(worst.mean)} in the mean and {shown(worst.largest)} at most"
    )
    return (
        f"WRONG: {subject} answers {len(judgement.outside)} of {len(rows)} requests otherwise than the same engine "
        f"without DCP; the worst, {worst.phase}, a prompt of {worst.num_prompt_tokens:,} "
        f"token{'s' if worst.num_prompt_tokens > 1 else ''}: {numbers}."
    )


def print_findings(findings: Findings, console: Console) -> None:
    """The tables, the verdict and what it rests on."""
    judgement = findings.judgement
    console.print("", rows_table(findings), "", engines_table(findings.engines), "", sep="\n")
    for note in notes(findings):
        console.print(Text(note, "dim"))
    console.print(Text(verdict_sentence(findings), _STYLES[judgement.verdict]))


def notes(findings: Findings) -> list[str]:
    """What the verdict rests on, one sentence each."""
    judgement, recall = findings.judgement, findings.measured.recall
    found = [
        f"Bounds of each request: mean {shown(judgement.bounds.mean)}, single token {shown(judgement.bounds.maximum)}: "
        f"{judgement.bounds.reason}. Without DCP: mean {shown(judgement.noise[0])}, single token "
        f"{shown(judgement.noise[1])}. For scale, one rank's tokens of half a prompt exchanged: mean "
        f"{judgement.sensitivity:.2f}."
    ]
    found += findings.warnings
    longest = max(row.num_prompt_tokens for row in findings.measured.rows)
    if longest <= findings.effective_block:
        found.append(
            f"No prompt was longer than one block of {findings.effective_block:,} tokens: give a larger "
            "--max-model-len after --."
        )
    if findings.prefix_hits is None:
        found.append("Prefix caching was off: answers from the cache were not tested.")
    elif findings.prefix_hits == 0:
        found.append("No prompt was found in the prefix cache: answers from the cache were not tested.")
    if recall is not None:
        found.append(
            f"Facts recalled: {recall.num_with_dcp} of {recall.num_asked} with DCP, {recall.num_without} without."
        )
    return found


def rows_table(findings: Findings) -> Table:
    """One row per request; beside it two computations without DCP, where that was measured."""
    # Of several measurements the last, which is between engines.
    noise = {(row.phase, row.num_prompt_tokens): row for row in findings.measured.noise}
    table = Table(
        title="Log-probabilities, absolute difference: with DCP and without, and twice without", title_justify="left"
    )
    table.add_column("request", no_wrap=True)
    table.add_column("prompt\ntokens", justify="right")
    table.add_column("compared\ntokens", justify="right")
    table.add_column("with - without\nmean", justify="right")
    table.add_column("\nmax", justify="right")
    table.add_column("both without\nmean", justify="right")
    table.add_column("\nmax", justify="right")
    table.add_column("greedy\nequal", justify="right")
    for row in findings.measured.rows:
        own = noise.get((row.phase, row.num_prompt_tokens))
        table.add_row(
            row.phase,
            f"{row.num_prompt_tokens:,}",
            f"{len(row.differences):,}",
            *_numbers(row),
            *(_numbers(own) if own is not None else ("", "")),
            "" if row.num_equal is None else f"{row.num_equal} of {row.num_generated}",
            style="red" if row in findings.judgement.outside else None,
        )
    return table


def engines_table(engines: Sequence[EngineFacts]) -> Table:
    """One row per server."""
    table = Table(title="Engines", title_justify="left")
    for name in ("engine", "seconds to start", "seconds to answer", "KV tokens that vLLM reports"):
        table.add_column(name, justify="left" if name == "engine" else "right")
    for engine in engines:
        table.add_row(
            engine.name,
            f"{engine.seconds_to_start:.0f}",
            f"{engine.seconds_to_answer:.0f}",
            "?" if engine.kv_tokens is None else f"{engine.kv_tokens:,}",
        )
    return table


def document(findings: Findings, exit_status: int) -> dict[str, Any]:
    """The report as JSON types; a number that is none, or infinite, is null."""
    judgement, measured = findings.judgement, findings.measured
    return {
        "format": FORMAT,
        "plugin": __version__,
        "verdict": judgement.verdict.value,
        "exit_status": exit_status,
        "sentence": verdict_sentence(findings),
        "notes": notes(findings),
        "whose": findings.whose,
        "effective_block": findings.effective_block,
        "dtype": findings.dtype,
        "noise": {"mean": _finite(judgement.noise[0]), "largest": _finite(judgement.noise[1])},
        "bounds": {"mean": _finite(judgement.bounds.mean), "largest": _finite(judgement.bounds.maximum)},
        "sensitivity": _finite(judgement.sensitivity),
        "prefix_hits": findings.prefix_hits,
        "recall": measured.recall and asdict(measured.recall),
        "engines": [asdict(engine) for engine in findings.engines],
        "rows": [_row(row, is_within=row not in judgement.outside) for row in measured.rows],
        "noise_rows": [_row(row) for row in measured.noise],
    }


def failure_document(error: str, exit_status: int, facts: dict[str, Any]) -> dict[str, Any]:
    """The report where there is no verdict."""
    return {
        "format": FORMAT,
        "plugin": __version__,
        "verdict": None,
        "exit_status": exit_status,
        "sentence": error,
        **facts,
    }


def write_json(content: dict[str, Any], file: Path) -> None:
    """Write a report."""
    file.write_text(json.dumps(content, indent=1, allow_nan=False) + "\n", "utf-8")


def _row(row: Row, **more: bool) -> dict[str, Any]:
    return {
        "phase": row.phase,
        "num_prompt_tokens": row.num_prompt_tokens,
        "num_compared": len(row.differences),
        "mean": _finite(row.mean),
        "largest": _finite(row.largest),
        "has_reference": row.has_reference,
        "num_greedy_equal": row.num_equal,
        "num_generated": row.num_generated,
        **more,
    }


def _numbers(row: Row) -> tuple[str, str]:
    if not row.differences:
        return "", ""
    if math.isinf(row.largest):
        return "NaN", "NaN"
    return shown(row.mean), shown(row.largest)


def shown(value: float) -> str:
    """A difference in at most seven characters."""
    return f"{value:.1e}" if 0 < value < _SMALL else f"{value:.4f}"


def _finite(value: float) -> float | None:
    return value if math.isfinite(value) else None
