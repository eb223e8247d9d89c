# SPDX-License-Identifier: Apache-2.0
"""Trained models answer questions about long texts under DCP as without it, token by token.

A few combinations and short texts; ``python tests/recall/sweep.py`` runs all of them with 500 prompts.
"""

from __future__ import annotations

import pytest
import task
from recall_engines import RecallEngines, judge, recall_engine, recall_phases

pytestmark = pytest.mark.e2e

PROMPTS = task.make_prompts(48, seed=11, max_length=1500, num_questions=4)
MARGIN = 2.0
"""Nats between the best token and the next, below which noise could choose."""

DCP_ENGINES = [
    pytest.param(recall_engine("lfm2", tp=2, dcp=2, interleave=16), id="lfm2-T2N2-I16"),
    pytest.param(recall_engine("lfm2", tp=4, dcp=4, interleave=1), id="lfm2-T4N4-I1"),
]


@pytest.mark.parametrize("engine", DCP_ENGINES)
def test_every_answer_equals_the_one_without_dcp(recall_engines: RecallEngines, engine) -> None:
    oracle = recall_engines.run(recall_engine(engine.kind, tp=1), recall_phases(PROMPTS))
    run = recall_engines.run(engine, recall_phases(PROMPTS))
    verdict = judge(run, oracle, PROMPTS)
    print(f"\n{verdict}")
    assert (verdict.num_differing, verdict.num_repeats_differing) == (0, 0)
    assert verdict.num_right == len(PROMPTS)
    assert verdict.smallest_margin > MARGIN


@pytest.mark.parametrize("engine", DCP_ENGINES)
def test_repeated_prompts_are_answered_from_the_prefix_cache(recall_engines: RecallEngines, engine) -> None:
    """Every repeat hits all whole effective blocks before its last token."""
    run = recall_engines.run(engine, recall_phases(PROMPTS))
    effective = engine.block_size * engine.dcp
    prompts = PROMPTS[: -len(PROMPTS) // 8 - 1 : -1]
    expected = [(len(prompt.tokens) - 1) // effective * effective for prompt in prompts]
    assert [request["num_cached_tokens"] for request in run.phases[1]] == expected
    assert any(expected)
