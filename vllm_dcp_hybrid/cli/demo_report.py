# SPDX-License-Identifier: Apache-2.0
"""What `demo` prints at the end of one model: how far the two servers agree, and what DCP saves."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

from rich.console import Console
from rich.table import Table
from rich.text import Text

from vllm_dcp_hybrid.cli import compare
from vllm_dcp_hybrid.cli.compare import Agreement, Bounds, Generation

_KV_TOKENS = re.compile(r"KV cache size: ([\d,]+) tokens")
_BYTES_PER_TOKEN = re.compile(r"attention KV ([\d.]+) bytes per token and rank")


@dataclass(frozen=True)
class ServerRun:
    """What one server did.

    Attributes:
        dcp_size: its DCP size.
        seconds_to_start: until it answered.
        first: the answers to the prompts.
        again: the answers to the same prompts once more, None without prefix caching.
        prefix_hits: tokens of the second time that came from the cache.
        kv_tokens: tokens that vLLM says fit into its KV cache, None where it does not say.
        bytes_per_token: of sharded KV per rank, None where nobody knows.
    """

    dcp_size: int
    seconds_to_start: float
    first: tuple[Generation, ...]
    again: tuple[Generation, ...] | None
    prefix_hits: int
    kv_tokens: int | None
    bytes_per_token: float | None


def kv_tokens_in(log: str) -> int | None:
    """The capacity that vLLM's log states."""
    match = _KV_TOKENS.search(log)
    return int(match[1].replace(",", "")) if match else None


def bytes_per_token_in(log: str) -> float | None:
    """The bytes that the plugin's line states; a server without DCP has no such line."""
    match = _BYTES_PER_TOKEN.search(log)
    return float(match[1]) if match else None


def print_report(runs: tuple[ServerRun, ServerRun], bounds: Bounds, console: Console) -> bool:
    """Print the tables and the verdict.

    Args:
        runs: with DCP and without.

    Returns:
        Whether the runs agree.
    """
    first = compare_all(runs[0].first, runs[1].first)
    again = compare_all(runs[0].again or (), runs[1].again or ())
    console.print("\n", agreement_table(first, again, runs[0].dcp_size, bounds), "\n", memory_table(runs), "\n", sep="")
    rows = [*first, *again]
    scored = [difference for row in rows for difference in row.prompt]
    generated = [difference for row in rows for difference in row.generated]
    is_good = all(row.is_within(bounds) for row in rows) and bounds.hold_for(scored) and bounds.hold_for(generated)
    everything = [*scored, *generated]
    numbers = (
        f"over {len(everything):,} tokens DCP {runs[0].dcp_size} and DCP 1 differ by "
        f"{compare.mean(everything):.5f} in the mean and {compare.largest(everything):.5f} at most."
    )
    console.print(Text(f"AGREE: {numbers}", "bold green") if is_good else Text(f"DISAGREE: {numbers}", "bold red"))
    limits = f"Bounds: mean {bounds.mean:g}, single token {bounds.maximum:g}. {bounds.reason}"
    console.print(Text(limits, "dim"))
    return is_good


def compare_all(ours: Sequence[Generation], theirs: Sequence[Generation]) -> list[Agreement]:
    """Request by request."""
    return [compare.compare(one, other) for one, other in zip(ours, theirs, strict=True)]


def agreement_table(first: Sequence[Agreement], again: Sequence[Agreement], dcp_size: int, bounds: Bounds) -> Table:
    """One row per request; `again` are the ones that could use the prefix cache."""
    table = Table(title=f"Log-probabilities: DCP {dcp_size} against DCP 1, absolute difference", title_justify="left")
    table.add_column("request", no_wrap=True)
    table.add_column("prompt\nmean", justify="right")
    table.add_column("\nmax", justify="right")
    table.add_column("generated\nmean", justify="right")
    table.add_column("\nmax", justify="right")
    table.add_column("greedy\nequal", justify="right")
    for name, rows in (("", first), (", again", again)):
        for row in rows:
            prompt = _mean_and_largest(row.prompt) if row.prompt else ("", "")
            table.add_row(
                f"{row.num_prompt_tokens:,} tokens{name}",
                *prompt,
                *_mean_and_largest(row.generated),
                _greedy(row),
                style=None if row.is_within(bounds) else "red",
            )
    num_equal = sum(row.first_difference is None for row in (*first, *again))
    num_prompt = sum(len(row.prompt) for row in first)
    num_generated = sum(len(row.generated) for row in (*first, *again))
    caption = (
        f"{num_prompt:,} prompt and {num_generated:,} generated tokens compared, up to the first greedy difference; "
        f"greedy text equal in {num_equal} of {len(first) + len(again)} requests."
    )
    if again:
        caption += " Again: with the prompts in the prefix cache."
    table.caption = caption
    table.caption_justify = "left"
    return table


def _mean_and_largest(differences: Sequence[float]) -> tuple[str, str]:
    return f"{compare.mean(differences):.4f}", f"{compare.largest(differences):.4f}"


def _greedy(row: Agreement) -> str:
    if row.first_difference is None:
        return f"all {row.num_generated}"
    return f"first {row.first_difference}"


def memory_table(runs: Sequence[ServerRun]) -> Table:
    """One row per server: what a token costs a rank, and how many fit."""
    table = Table(title="KV cache of the attention layers", title_justify="left")
    table.add_column("server", no_wrap=True)
    table.add_column("bytes per token\nand rank", justify="right")
    table.add_column("KV tokens\nthat vLLM reports", justify="right")
    table.add_column("prompt tokens found\nin the prefix cache", justify="right")
    for run in sorted(runs, key=lambda run: run.dcp_size):
        asked = sum(generation.num_prompt_tokens for generation in run.again or ())
        table.add_row(
            f"DCP {run.dcp_size}",
            "?" if run.bytes_per_token is None else f"{run.bytes_per_token:,.0f}",
            "?" if run.kv_tokens is None else f"{run.kv_tokens:,}",
            f"{run.prefix_hits:,} of {asked:,}" if run.again is not None else "off",
        )
    return table
