# SPDX-License-Identifier: Apache-2.0
"""DCP N against the oracle: the same stock engine, the same TP, N = 1, without the plugin's help.

The bound is measured, not chosen: two engines may differ by as much as TP 1 and TP 2 of stock vLLM differ for the same
model (mean), and by no more than twice that (largest).  In float32, where the CPU runs short convolutions, they agree
to within rounding.
"""

from __future__ import annotations

import re
from dataclasses import replace

import pytest
from engines import REPEATED, Engine, Engines, difference, everything, without_dcp

pytestmark = pytest.mark.e2e

CPU_BLOCK = 128
FLOAT32_NOISE = 2e-3

LFM2 = Engine("lfm2", tp=2, dtype="float32")
QWEN_NEXT = Engine("qwen3-next", tp=2)
QWEN_NEXT_2KV = Engine("qwen3-next", tp=4, kv_heads=2, skew_kv_heads=True)
QWEN_35 = Engine("qwen3.5", tp=2)

FLOAT32 = [
    pytest.param(
        replace(LFM2, dcp=2, interleave=16, comm="a2a", prefix_caching=True, block_size=272),
        id="lfm2-T2N2-I16-a2a-cached-block272",
    ),
    # As users run it: with torch.compile.
    pytest.param(
        replace(LFM2, dcp=2, max_num_batched_tokens=256, is_eager=False, environment=(("TORCHDYNAMO_DISABLE", "0"),)),
        id="lfm2-T2N2-I1-ag_rs-chunk256-compiled",
    ),
]
BFLOAT16 = [
    pytest.param(
        replace(QWEN_NEXT, dcp=2, interleave=16, comm="a2a", prefix_caching=True, max_num_batched_tokens=256),
        id="qwen3-next-T2N2-I16-a2a-cached-chunk256",
    ),
    pytest.param(replace(QWEN_35, dcp=2, interleave=CPU_BLOCK), id="qwen3.5-T2N2-IB-ag_rs"),
    pytest.param(replace(QWEN_NEXT, tp=4, dcp=4, interleave=1, comm="a2a"), id="qwen3-next-T4N4-I1-a2a"),
    # Cases 8 and 31: two DCP groups inside the TP group, KV heads with very different weights.
    pytest.param(replace(QWEN_NEXT_2KV, dcp=2, prefix_caching=True), id="qwen3-next-T4N2-I1-ag_rs-cached-skewed"),
]


def oracle(engine: Engine) -> Engine:
    """The same model and TP without DCP, without prefix caching and with stock's chunks."""
    return without_dcp(engine, block_size=None, is_eager=True, environment=())


@pytest.mark.parametrize("engine", FLOAT32)
def test_float32_engines_agree_to_rounding(engines: Engines, engine: Engine) -> None:
    gap = difference(everything(engines.run(engine)), everything(engines.run(oracle(engine))))
    assert gap.largest < FLOAT32_NOISE, gap


@pytest.mark.parametrize("engine", FLOAT32)
def test_float32_engines_generate_the_same_tokens(engines: Engines, engine: Engine) -> None:
    ours, theirs = engines.run(engine), engines.run(oracle(engine))
    assert [request["tokens"] for request in ours.decoded] == [request["tokens"] for request in theirs.decoded]


@pytest.mark.parametrize("engine", BFLOAT16)
def test_bfloat16_engines_differ_by_no_more_than_tensor_parallel_sizes_do(engines: Engines, engine: Engine) -> None:
    expected = engines.run(oracle(engine))
    gap = difference(everything(engines.run(engine)), everything(expected))
    tp1 = engines.run(replace(oracle(engine), tp=1))
    bound = difference(everything(tp1), everything(expected))
    print(f"\nDCP {engine.dcp}: {gap}\nTP 1 against TP {engine.tp}: {bound}")
    assert gap.mean <= bound.mean
    assert gap.largest <= 2 * bound.largest


@pytest.mark.parametrize("engine", [*FLOAT32, *BFLOAT16])
def test_case_15_prompts_shorter_than_the_ranks_are_answered_with_numbers(engines: Engines, engine: Engine) -> None:
    """CASES 15: lengths 1 to N + 1; NaN would fail the comparison in `difference`, infinities here."""
    for request in engines.run(engine).scored[:4]:
        assert all(-100 < value <= 0 for value in request["logprobs"])


@pytest.mark.parametrize("engine", [*FLOAT32, *BFLOAT16])
def test_a_prompt_of_one_token_does_not_depend_on_earlier_requests(engines: Engines, engine: Engine) -> None:
    """Stock's GDN lets it start from the state that its block's previous owner left behind."""
    run = engines.run(engine)
    first, later = run.scored[0], run.phases[2][0]
    assert later["tokens"] == first["tokens"]
    assert later["logprobs"] == pytest.approx(first["logprobs"], abs=0.1)


CACHED = [param for param in (*FLOAT32, *BFLOAT16) if param.values[0].prefix_caching]


@pytest.mark.parametrize("engine", CACHED)
def test_case_12_repeated_prompts_hit_every_whole_effective_block(engines: Engines, engine: Engine) -> None:
    """CASES 12: prompts of 1,377 and 3,000 tokens; stock 0.26.0 hits nothing at block 272, N = 2.

    1,632 tokens are three effective blocks of 544: a repeat computes its last token again, and hits two.
    """
    run = engines.run(engine)
    effective = (engine.block_size or CPU_BLOCK) * engine.dcp
    cold, warm = run.phases[3], run.phases[4]
    assert [request["num_cached_tokens"] for request in cold] == [0, 0, 0]
    assert [request["num_cached_tokens"] for request in warm] == [(n - 1) // effective * effective for n in REPEATED]


@pytest.mark.parametrize("engine", CACHED)
def test_case_10_warm_answers_equal_cold_ones(engines: Engines, engine: Engine) -> None:
    """CASES 10: a state that is ahead of its prefix would change the answer after a hit."""
    run = engines.run(engine)
    gap = difference(run.phases[3], run.phases[4])
    assert gap.largest < (FLOAT32_NOISE if engine.dtype == "float32" else 0.3), gap


@pytest.mark.parametrize("engine", CACHED)
def test_case_11_a_hit_never_exceeds_the_common_prefix(engines: Engines, engine: Engine) -> None:
    """CASES 11: prompts share 550 tokens with a cached one."""
    for request in engines.run(engine).phases[6]:
        assert request["num_cached_tokens"] <= 550


@pytest.mark.parametrize("engine", [*FLOAT32, *BFLOAT16])
def test_case_09_the_engine_reports_the_capacity_that_the_geometry_predicts(engines: Engines, engine: Engine) -> None:
    """CASES 9: stock's own figure, from its log, against ours, from ours."""
    log = engines.run(engine).log
    reported = re.search(r"GPU KV cache size: ([\d,]+) tokens", log)
    expected = re.search(r"engine core: .* KV tokens expected: ([\d,]+) ", log)
    assert reported
    assert expected
    assert reported[1] == expected[1]


@pytest.mark.parametrize("engine", [*FLOAT32, *BFLOAT16])
def test_case_27_every_process_reports_the_same_fingerprint(engines: Engines, engine: Engine) -> None:
    """CASES 27: API process, engine core and worker each say which patches they run with."""
    lines = re.findall(r"fingerprint (\w+)\), ([a-zA-Z ]+?)[\d:]", engines.run(engine).log)
    assert {role.strip() for _, role in lines} == {"API server", "engine core", "worker rank"}
    assert len({fingerprint for fingerprint, _ in lines}) == 1


@pytest.mark.parametrize(("one", "two"), [(FLOAT32[1], BFLOAT16[0])])
def test_per_rank_attention_bytes_are_one_nth(engines: Engines, one, two) -> None:
    """Effective blocks hold N times the tokens in the same bytes, as the engine's own line says."""
    for engine in (one.values[0], two.values[0]):
        line = re.search(r"attention sharded: block (\d+), effective (\d+), ", engines.run(engine).log)
        assert line
        assert int(line[2]) == engine.dcp * int(line[1])
