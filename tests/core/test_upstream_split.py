# SPDX-License-Identifier: Apache-2.0
"""Chunk ends of the releases whose own hybrid DCP loses prefix hits to theirs (0.26 - 0.28)."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from vllm_dcp_hybrid.core.upstream_split import largest_chunk

B = 272
OURS = pytest.mark.replaces("vllm_dcp_hybrid.core.upstream_split:mamba_block_aligned_split")


@pytest.mark.parametrize(("threshold", "expected"), [(0, 2048), (512, 512), (4096, 2048)])
def test_the_largest_chunk_is_the_budget_or_the_threshold_below_it(threshold: int, expected: int) -> None:
    config = SimpleNamespace(long_prefill_token_threshold=threshold)
    assert largest_chunk(SimpleNamespace(scheduler_config=config, max_num_scheduled_tokens=2048)) == expected


def chunk_ends(engine: Any, length: int) -> list[int]:
    """Where the chunks of a prompt end in vLLM's scheduler loop."""
    assert engine.run_one("only", [3 + number % 900 for number in range(length)]) == 0
    return [end for end in engine.chunk_ends("only") if end <= length]


@OURS
@pytest.mark.contract
@pytest.mark.parametrize(
    ("dcp", "length", "budget", "ends"),
    [
        (2, 1377, 2048, [1088, 1377]),
        (2, 1649, 2048, [1632, 1649]),
        (2, 3000, 2048, [1632, 2720, 3000]),
        (2, 1377, 512, [272, 544, 816, 1088, 1360, 1377]),
        (4, 3000, 2048, [1088, 2176, 3000]),
        (1, 1377, 2048, [1360, 1377]),
    ],
)
def test_chunks_end_where_a_hit_can_end(scenes: Any, dcp: int, length: int, budget: int, ends: list[int]) -> None:
    """TARGETS 5.4; where no chunk can be a scheduler block long, on every rank block, as stock ends them.

    Stock 0.26 also stops at the prompt's last hash, where it hopes for a hit that needs DCP 1.
    """
    last_hash = length // B * B
    found = chunk_ends(scenes.make_engine(dcp=dcp, budget=budget), length)
    assert [end for end in found if end in ends or end != last_hash] == ends


@OURS
@pytest.mark.contract
@pytest.mark.parametrize(
    ("length", "stock", "ours"), [(1377, 0, 1088), (1649, 1632, 1632), (3000, 0, 2720), (5000, 4896, 4896)]
)
def test_case_12_stock_hits_less(scenes: Any, length: int, stock: int, ours: int) -> None:
    """CASES 12: the same engine with the plugin switched off and on."""
    tokens = [3 + number % 900 for number in range(length)]
    for options, expected in (({"dcp_hybrid": {"enabled": False}}, stock), ({}, ours)):
        engine = scenes.make_engine(dcp=2)
        engine.config.additional_config = options
        assert engine.run_one("cold", tokens) == 0
        assert engine.run_one("warm", tokens) == expected
