# SPDX-License-Identifier: Apache-2.0
"""TP 2 DCP 2 on two GPUs as users run it: NCCL, custom all-reduce, FULL graphs, prefix caching.

``DCP_TEST_STOCK_PYTHON`` names an interpreter with stock vLLM 0.26.0, whose own hybrid DCP is then asked the same.
"""

from __future__ import annotations

import os
import re
from dataclasses import replace

import pytest
from engines import REPEATED, Engine, Engines, Run, difference, everything, without_dcp

pytestmark = pytest.mark.multi_gpu

STOCK_PYTHON = os.environ.get("DCP_TEST_STOCK_PYTHON")
COMMON = {"tp": 2, "dcp": 2, "prefix_caching": True, "is_on_gpu": True, "is_eager": False}
# FlashInfer's kernels need a compiler on the machine; Triton is the other choice.
GDN = (("gdn_prefill_backend", "triton"),)
ENGINES = {
    "lfm2": Engine("lfm2", **COMMON),
    "lfm2-a2a": Engine("lfm2", comm="a2a", interleave=16, **COMMON),
    "qwen3-next": Engine("qwen3-next", extra=GDN, **COMMON),
}
each_engine = pytest.mark.parametrize("engine", ENGINES.values(), ids=ENGINES)


def others(engine: Engine) -> list[Engine]:
    """What is compared: the oracle, TP 1 (their difference is the noise), and upstream's DCP 2 where it is at hand."""
    oracle = without_dcp(engine, extra=engine.extra)
    # Upstream's a2a first talks to its peers while a graph is being captured, which NCCL 2.30 refuses.
    upstream = [replace(engine, python=STOCK_PYTHON, comm="ag_rs")] if STOCK_PYTHON else []
    return [oracle, replace(oracle, tp=1), *upstream]


def all_runs(engines: Engines, engine: Engine) -> list[Run]:
    """Ours, then those of `others`: started side by side once."""
    return engines.run_side_by_side(engine, *others(engine))


@each_engine
def test_dcp_2_differs_from_dcp_1_by_no_more_than_tensor_parallel_sizes_do(engines: Engines, engine: Engine) -> None:
    ours, oracle, tp1, *_ = map(everything, all_runs(engines, engine))
    gap, bound = difference(ours, oracle), difference(tp1, oracle)
    print(f"\nDCP 2 against DCP 1: {gap}\nTP 1 against TP 2: {bound}")
    assert gap.mean <= bound.mean
    assert gap.largest <= 2 * bound.largest


@each_engine
@pytest.mark.skipif(not STOCK_PYTHON, reason="DCP_TEST_STOCK_PYTHON names no interpreter with vLLM 0.26.0")
def test_dcp_2_agrees_with_upstreams_dcp_2(engines: Engines, engine: Engine) -> None:
    """But for a prompt of one token, to which 0.26.0 answers NaN."""
    ours, oracle, tp1, upstream = (everything(run)[1:] for run in all_runs(engines, engine))
    gap, bound = difference(ours, upstream), difference(tp1, oracle)
    print(f"\nours against upstream: {gap}\nupstream against DCP 1 of 0.25.1: {difference(upstream, oracle)}")
    assert gap.mean <= bound.mean
    assert gap.largest <= 2 * bound.largest


@each_engine
def test_the_kv_cache_holds_as_many_tokens_as_the_geometry_says(engines: Engines, engine: Engine) -> None:
    ours, oracle, *_ = all_runs(engines, engine)
    expected = re.search(r"engine core: .* KV tokens expected: ([\d,]+) ", ours.log)
    sizes = [re.search(r"GPU KV cache size: ([\d,]+) tokens", run.log) for run in (ours, oracle)]
    assert expected
    assert all(sizes)
    print(f"\nKV tokens at DCP 2: {sizes[0][1]}, expected {expected[1]}; at DCP 1: {sizes[1][1]}")
    assert sizes[0][1] == expected[1]


@each_engine
def test_full_graphs_are_captured_and_custom_all_reduce_is_on(engines: Engines, engine: Engine) -> None:
    log = all_runs(engines, engine)[0].log
    assert "Capturing CUDA graphs (decode, FULL)" in log
    assert "disable_custom_all_reduce=False" in log


@each_engine
def test_case_12_repeated_prompts_hit_every_whole_effective_block(engines: Engines, engine: Engine) -> None:
    """CASES 12, with the block size that the engine chose."""
    run = engines.run(engine)
    found = re.search(r"attention sharded: block (\d+), effective (\d+), ", run.log)
    assert found
    assert [request["num_cached_tokens"] for request in run.phases[4]] == [
        (length - 1) // int(found[2]) * int(found[2]) for length in REPEATED
    ]
