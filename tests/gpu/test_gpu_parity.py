# SPDX-License-Identifier: Apache-2.0
"""DCP N against N = 1 on a GPU, all ranks on one device: the CPU suite's questions to the CUDA engine."""

from __future__ import annotations

import re
from dataclasses import replace

import pytest
from engines import REPEATED, Engine, Engines, difference, everything, without_dcp

pytestmark = pytest.mark.gpu

LFM2 = Engine("lfm2", tp=2, is_on_gpu=True, is_eager=False)
FP8 = (("kv_cache_dtype", "fp8"),)
# The bundle of tests/gpu lacks FlashInfer, which vLLM would choose here.
GDN = (("gdn_prefill_backend", "triton"),)
FA2 = (("attention_config", '{"flash_attn_version": 2}'),)

CASES = [
    pytest.param(replace(LFM2, dcp=2, prefix_caching=True), id="lfm2-graphs-ag_rs-cached"),
    pytest.param(replace(LFM2, dcp=2, interleave=16, comm="a2a", is_eager=True), id="lfm2-eager-a2a-I16"),
    pytest.param(
        replace(LFM2, dcp=2, interleave=16, comm="a2a", prefix_caching=True, max_num_batched_tokens=512),
        id="lfm2-graphs-a2a-I16-cached-chunk512",
    ),
    pytest.param(replace(LFM2, dcp=2, is_eager=True, extra=FA2), id="lfm2-eager-fa2"),
    pytest.param(
        Engine("qwen3-next", tp=2, dcp=2, prefix_caching=True, is_on_gpu=True, is_eager=False, extra=GDN),
        id="qwen3-next-graphs-ag_rs-cached",
    ),
    pytest.param(replace(LFM2, tp=4, dcp=4, prefix_caching=True), id="lfm2-T4-N4-graphs-ag_rs-cached"),
]


def oracle(engine: Engine) -> Engine:
    """The same model, TP, graphs and KV dtype without DCP."""
    return without_dcp(engine, extra=engine.extra if engine.extra in (FP8, GDN) else ())


@pytest.mark.parametrize("engine", CASES)
def test_engines_differ_by_no_more_than_tensor_parallel_sizes_do(engines: Engines, engine: Engine) -> None:
    ours, expected, tp1 = engines.run_side_by_side(engine, oracle(engine), replace(oracle(engine), tp=1))
    gap = difference(everything(ours), everything(expected))
    bound = difference(everything(tp1), everything(expected))
    print(f"\nDCP {engine.dcp}: {gap}\nTP 1 against TP {engine.tp}: {bound}")
    assert gap.mean <= bound.mean
    assert gap.largest <= 2 * bound.largest


def test_fp8_cache_is_no_further_from_bfloat16_than_stocks_own(engines: Engines) -> None:
    """Without DCP stock also reads a chunk's own tokens from the FP8 cache; here they are still in bfloat16."""
    ours = replace(LFM2, dcp=2, extra=FP8)
    sharded, whole, exact = map(everything, engines.run_side_by_side(ours, oracle(ours), LFM2))
    gap, stocks = difference(sharded, exact), difference(whole, exact)
    print(f"\nFP8 with DCP 2: {gap}\nFP8 with DCP 1: {stocks}")
    assert gap.mean <= stocks.mean
    assert gap.largest <= 2 * stocks.largest


@pytest.mark.parametrize("engine", [case for case in CASES if case.values[0].prefix_caching])
def test_case_12_repeated_prompts_hit_every_whole_effective_block(engines: Engines, engine: Engine) -> None:
    """CASES 12, with the block size that the engine chose."""
    run = engines.run(engine)
    found = re.search(r"attention sharded: block (\d+), effective (\d+), ", run.log)
    assert found
    effective = int(found[2])
    assert effective == engine.dcp * int(found[1])
    warm = [request["num_cached_tokens"] for request in run.phases[4]]
    assert warm == [(length - 1) // effective * effective for length in REPEATED]


@pytest.mark.parametrize("engine", [case for case in CASES if case.values[0].prefix_caching])
def test_case_10_warm_answers_equal_cold_ones(engines: Engines, engine: Engine) -> None:
    """CASES 10."""
    run = engines.run(engine)
    assert difference(run.phases[3], run.phases[4]).largest < 0.3


@pytest.mark.parametrize("engine", CASES)
def test_a_prompt_of_one_token_does_not_depend_on_earlier_requests(engines: Engines, engine: Engine) -> None:
    run = engines.run(engine)
    later, first = run.phases[2][0], {**run.scored[0], "prompt_logprobs": []}
    assert difference([later], [first]).largest < 0.3
