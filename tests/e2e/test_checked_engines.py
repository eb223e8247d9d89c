# SPDX-License-Identifier: Apache-2.0
"""The rank check in real engines: it is on in this whole suite (see conftest), and ends a run whose ranks disagree."""

from __future__ import annotations

import re

import pytest
from engines import Engine, Engines, tokens
from test_parity import BFLOAT16, FLOAT32

pytestmark = pytest.mark.e2e

LIMIT_S = 5
ASTRAY = Engine(
    "lfm2",
    tp=2,
    dcp=2,
    dtype="float32",
    environment=(("DCP_HYBRID_CHECK_RANKS", str(LIMIT_S)),),
    extra=(("worker_cls", "astray.SkippingWorker"),),
)


@pytest.mark.parametrize("engine", [*FLOAT32, *BFLOAT16])
def test_the_engines_of_this_suite_ran_under_the_check(engines: Engines, engine: Engine) -> None:
    assert f"rank check is on: {engine.tp} ranks" in engines.run(engine).log


def test_case_21_a_rank_that_skips_a_collective_ends_the_run_with_a_message(engines: Engines) -> None:
    """CASES 21: without the check both ranks would wait for ever."""
    work = [{"prompts": [tokens(length) for length in (3, 90, 300)], "max_tokens": 64}]
    code, log, _ = engines.attempt(ASTRAY, work)
    assert code not in (0, 124)
    (line, *_) = re.findall(r"rank check: the ranks disagree in .*", log)
    assert re.search(
        r"step \d+, call \d+, after .*rank 0: all_gather of the DCP exchange of \[3, \d+, \d+\] float32", line
    )
    assert re.search(r"rank 1: (all_gather|reduce_scatter) of the DCP exchange of", line)
