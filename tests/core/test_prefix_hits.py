# SPDX-License-Identifier: Apache-2.0
"""Prefix caching of a hybrid under DCP, in vLLM's real scheduler loop.

The pretended worker of `hybrid_scenes` stops a test as soon as a step reads a state or a position that is not of the
request's own prefix: a state that is cached ahead of its prefix cannot pass unnoticed (CASES 10).
"""

from __future__ import annotations

import random
from typing import Any

import pytest

pytestmark = pytest.mark.contract

B = 272


@pytest.fixture
def common_prefixes(scenes: Any) -> None:
    """Releases that keep a state where a prefix is found to be common; others keep states at chunk ends only."""
    if not scenes.keeps_states_of_common_prefixes():
        pytest.skip("stock keeps states of common prefixes from 0.24 on")


def prompt(length: int, seed: int = 0) -> list[int]:
    rng = random.Random(seed)
    return [rng.randrange(3, 1000) for _ in range(length)]


@pytest.mark.parametrize("budget", [2048, 512])
@pytest.mark.parametrize(
    ("length", "dcp", "at_least"),
    [
        (1377, 1, 1360),
        (1377, 2, 1088),
        (1649, 2, 1632),
        (3000, 1, 2992),
        (3000, 2, 2720),
        (5000, 2, 4896),
        (1377, 4, 1088),
        (3000, 4, 2176),
        (5000, 4, 4352),
    ],
)
def test_case_12_a_repeated_prompt_hits_all_whole_scheduler_blocks(
    scenes: Any, length: int, dcp: int, at_least: int, budget: int
) -> None:
    """CASES 12: stock 0.26 - 0.28 hit 0 of 1,377 and 3,000 tokens (TARGETS 5.4); from 0.29 on it hits rank blocks."""
    unit = scenes.hit_unit(dcp)
    expected = (length - 1) // unit * unit
    assert expected >= at_least
    engine = scenes.make_engine(dcp=dcp, budget=budget)
    tokens = prompt(length)
    assert engine.run_one("cold", tokens) == 0
    assert engine.run_one("warm", tokens) == expected
    assert engine.outputs["warm"] == engine.outputs["cold"]


@pytest.mark.replaces(
    "vllm_dcp_hybrid.core.prefill_split:mamba_block_aligned_split",
    "vllm_dcp_hybrid.core.upstream_split:mamba_block_aligned_split",
)
@pytest.mark.parametrize(
    ("length", "ours", "stocks"), [(1377, 1088, 0), (1649, 1632, 1632), (3000, 2720, 0), (5000, 4896, 4896)]
)
def test_case_12_never_fewer_hits_than_with_stocks_own_chunk_ends(
    scenes: Any, monkeypatch: pytest.MonkeyPatch, length: int, ours: int, stocks: int
) -> None:
    """CASES 12, TARGETS 5.4: this release's own split, over the same effective blocks (N = 2)."""
    tokens = prompt(length)

    def hit_of_a_repeat() -> int:
        engine = scenes.make_engine(dcp=2)
        assert engine.run_one("cold", tokens) == 0
        hit: int = engine.run_one("warm", tokens)
        return hit

    assert hit_of_a_repeat() == ours
    split = vars(scenes.Scheduler)["_mamba_block_aligned_split"].__wrapped__
    monkeypatch.setattr(scenes.Scheduler, "_mamba_block_aligned_split", split)
    assert hit_of_a_repeat() == stocks


@pytest.mark.parametrize("dcp", [1, 2, 4])
@pytest.mark.parametrize("length", [513, 1377, 3000])
def test_case_12_a_budget_below_the_scheduler_block_still_finds_hits(scenes: Any, length: int, dcp: int) -> None:
    """CASES 12: budget 256, which is one rank's two blocks of 128 and half of the scheduler block at N = 4."""
    specs = [*(scenes.recurrent_spec(128) for _ in range(3)), scenes.attention_spec(128, head_size=544)]
    engine = scenes.make_engine(dcp=dcp, budget=256, block_size=128, group_specs=specs)
    tokens = prompt(length)
    assert engine.run_one("cold", tokens) == 0
    unit = scenes.hit_unit(dcp, 128)
    assert engine.run_one("warm", tokens) == (length - 1) // unit * unit


def test_case_12_mla_is_sharded_and_hits_alike(scenes: Any) -> None:
    """CASES 12, for the latent KV of Kimi-Linear."""
    engine = scenes.make_engine(dcp=2, group_specs=scenes.hybrid_groups(attention=scenes.mla_spec()))
    tokens = prompt(3000)
    assert engine.run_one("cold", tokens) == 0
    unit = scenes.hit_unit(2)
    assert engine.run_one("warm", tokens) == 2999 // unit * unit >= 2720


@pytest.mark.usefixtures("common_prefixes")
@pytest.mark.parametrize("dcp", [2, 4])
@pytest.mark.parametrize("rank_blocks", [0.5, 1, 1.5, 2, 4])
def test_case_12_a_shared_prefix_hits_from_two_virtual_blocks_on(scenes: Any, rank_blocks: float, dcp: int) -> None:
    """CASES 12: P in {0.5, 1, 1.5, 2, 4} * B * N and unequal tails.

    The second request finds attention cached but no state at the end of the prefix, and keeps one there; the third
    hits it.  So it is at DCP 1 as well.
    """
    shared_len = int(rank_blocks * B * dcp)
    shared = prompt(shared_len)
    engine = scenes.make_engine(dcp=dcp)
    hits = [engine.run_one(f"r{tail}", shared + prompt(600, seed=tail)) for tail in (1, 2, 3)]
    assert hits[0] == 0
    assert all(hit <= shared_len for hit in hits)
    assert hits[2] == shared_len // (B * dcp) * B * dcp
    if rank_blocks >= 2:
        assert hits[2] > 0


@pytest.mark.parametrize("dcp", [1, 2, 4])
@pytest.mark.parametrize("block_size", [16, 272])
def test_case_11_hits_never_exceed_the_common_prefix(scenes: Any, block_size: int, dcp: int) -> None:
    """CASES 11: two prompts that share 150 of 550 tokens, and random others."""
    head_size = 256 * 272 // block_size
    specs = [
        *(scenes.recurrent_spec(block_size) for _ in range(3)),
        scenes.attention_spec(block_size, head_size=head_size),
    ]
    engine = scenes.make_engine(dcp=dcp, budget=512, block_size=block_size, group_specs=specs, num_blocks=4000)
    rng = random.Random(dcp)
    cases = [(150, 400)] + [(rng.randrange(1, 1500), rng.randrange(1, 300)) for _ in range(6)]
    best = 0
    for number, (shared_len, tail_len) in enumerate(cases):
        shared = prompt(shared_len, seed=100 + number)
        for tail in range(3):
            tokens = shared + prompt(tail_len, seed=1000 + 10 * number + tail)
            hit = engine.run_one(f"{number}-{tail}", tokens)
            assert hit <= (shared_len if tail else 0)
            assert hit % scenes.hit_unit(dcp, block_size) == 0
            best = max(best, hit)
    assert best > 0


@pytest.mark.parametrize("dcp", [1, 2])
@pytest.mark.parametrize("offset", [-1, 0, 1])
@pytest.mark.parametrize("num_blocks", [1, 2, 3, 4, 5])
def test_case_10_13_lengths_around_blocks_and_warm_continuations(
    scenes: Any, num_blocks: int, offset: int, dcp: int
) -> None:
    """CASES 10, 13: L in {k*M - 1, k*M, k*M + 1}; the prompt alone, then with its continuation."""
    tokens = prompt(num_blocks * B + offset)
    engine = scenes.make_engine(dcp=dcp)
    engine.run_one("prompt", tokens, max_tokens=3)
    # From 0.29 on rank blocks are hit, but where the prompt itself ends on one.
    units = {scenes.hit_unit(dcp), B * dcp}
    whole = tokens + engine.outputs["prompt"] + prompt(700, seed=9)
    hit = engine.run_one("whole", whole)
    # Written while decoding across a boundary, a state may be kept there as well.
    assert hit in {length // unit * unit for unit in units for length in (len(tokens), len(tokens) + 2)}
    assert hit >= len(tokens) // (B * dcp) * B * dcp
    assert engine.worker.num_reads_checked > 0


@pytest.mark.replaces("vllm_dcp_hybrid.core.prefill_split:mamba_block_aligned_split")
@pytest.mark.usefixtures("common_prefixes")
@pytest.mark.parametrize("dcp", [1, 2])
@pytest.mark.parametrize(("prefix_len", "tail_len"), [(1600, 600), (1500, 700)])
def test_case_13_a_hit_of_0_is_visible_as_an_uncached_common_prefix(
    scenes: Any, prefix_len: int, tail_len: int, dcp: int
) -> None:
    """CASES 13: prefix and tail mixes; the coordinator tells how much attention had, and the next request hits it."""
    shared = prompt(prefix_len)
    engine = scenes.make_engine(dcp=dcp)
    engine.run_one("first", shared + prompt(tail_len, seed=1))
    whole = prefix_len // (B * dcp) * B * dcp
    engine.add("second", shared + prompt(tail_len, seed=2))
    engine.step()
    coordinator = engine.scheduler.kv_cache_manager.coordinator
    assert engine.hits["second"] + coordinator.num_uncached_common_prefix_tokens == whole
    engine.run()
    assert engine.run_one("third", shared + prompt(tail_len, seed=3)) == whole


@pytest.mark.parametrize("dcp", [1, 2, 4])
def test_case_10_every_group_has_a_block_at_the_hit_boundary(scenes: Any, dcp: int) -> None:
    """CASES 10: a hit of H tokens has H / (B*N) attention blocks, rounded up, and alone the state of H tokens."""
    engine = scenes.make_engine(dcp=dcp)
    tokens = prompt(3000)
    engine.run_one("cold", tokens)
    manager = engine.scheduler.kv_cache_manager
    request = scenes.make_request("warm", tokens, engine.scheduler.tests_hash_block)
    blocks, hit, *_ = manager.get_computed_blocks(request)
    unit = scenes.hit_unit(dcp)
    assert hit == 2999 // unit * unit
    *recurrent, attention = blocks.blocks
    assert len(attention) == -(-hit // (B * dcp))
    assert not any(block.is_null for block in attention)
    for states in recurrent:
        assert len(states) == hit // B
        assert [number for number, block in enumerate(states) if not block.is_null] == [hit // B - 1]


@pytest.mark.replaces("vllm_dcp_hybrid.core.prefill_split:mamba_block_aligned_split")
@pytest.mark.parametrize("dcp", [1, 2, 4])
def test_case_12_the_lookup_per_group_agrees_with_the_whole_one(scenes: Any, dcp: int) -> None:
    """CASES 12: the connectors' lookup is stock's too, over the same scaled groups."""
    engine = scenes.make_engine(dcp=dcp)
    tokens = prompt(3000)
    engine.run_one("cold", tokens)
    request = scenes.make_request("warm", tokens, engine.scheduler.tests_hash_block)
    coordinator = engine.scheduler.kv_cache_manager.coordinator
    if not hasattr(coordinator, "find_longest_cache_hit_per_group"):
        pytest.skip("stock has this lookup from 0.24 on")
    _, lengths = coordinator.find_longest_cache_hit_per_group(request.block_hashes, 2999)
    assert set(lengths) == {2999 // (B * dcp) * B * dcp}


@pytest.mark.replaces(
    "vllm_dcp_hybrid.core.prefill_split:mamba_block_aligned_split",
    "vllm_dcp_hybrid.core.upstream_split:mamba_block_aligned_split",
)
@pytest.mark.parametrize(("dcp", "expected"), [(1, 2720), (2, 2176), (4, 1088)])
def test_with_an_eagle_drafter_one_whole_effective_block_is_dropped(scenes: Any, dcp: int, expected: int) -> None:
    engine = scenes.make_engine(dcp=dcp)
    engine.groups.kv_cache_groups[-1].is_eagle_group = True
    engine.scheduler.use_eagle = True
    engine.scheduler.kv_cache_manager = scenes.make_manager(engine.config, engine.groups, use_eagle=True)
    tokens = prompt(3000)
    assert engine.run_one("cold", tokens) == 0
    assert engine.run_one("warm", tokens) == expected


def test_without_prefix_caching_nothing_is_hit_and_all_is_computed(scenes: Any) -> None:
    engine = scenes.make_engine(dcp=2, mode="none", group_specs=scenes.hybrid_groups("none", recurrent_block=8192))
    tokens = prompt(3000)
    assert engine.run_one("cold", tokens) == engine.run_one("warm", tokens) == 0
    assert engine.chunk_ends("warm")[-2:] == [3000, 3001]


@pytest.mark.parametrize("dcp", [2, 4])
def test_case_19_a_burst_of_tails_over_one_prefix(scenes: Any, dcp: int) -> None:
    """CASES 19: P = 10*B*N and 1..13 concurrent tails of 1..7 tokens; C = 1.5*B; max_tokens=1 frees its blocks."""
    shared = prompt(10 * B * dcp)
    engine = scenes.make_engine(dcp=dcp, budget=3 * B // 2, max_len=16384)
    engine.run_one("first", shared, max_tokens=1)
    free_blocks = engine.scheduler.kv_cache_manager.block_pool.get_num_free_blocks()
    for number in range(13):
        engine.add(f"tail{number}", shared + prompt(1 + number % 7, seed=number), max_tokens=1 + number % 2)
    engine.run()
    assert all(engine.hits[f"tail{number}"] == len(shared) for number in range(13))
    assert engine.scheduler.kv_cache_manager.block_pool.get_num_free_blocks() == free_blocks
