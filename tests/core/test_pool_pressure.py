# SPDX-License-Identifier: Apache-2.0
"""A pool that is far too small: eviction, preemption and small budgets, in vLLM's real scheduler loop."""

from __future__ import annotations

import random
from typing import Any

import pytest

pytestmark = pytest.mark.contract

B = 16
HEAD_SIZE = 256 * 272 // B


def small_engine(scenes: Any, *, dcp: int, num_blocks: int, **options: Any) -> Any:
    specs = [*(scenes.recurrent_spec(B) for _ in range(3)), scenes.attention_spec(B, head_size=HEAD_SIZE)]
    return scenes.make_engine(dcp=dcp, block_size=B, group_specs=specs, num_blocks=num_blocks, **options)


def prompt(length: int, seed: int) -> list[int]:
    rng = random.Random(seed)
    return [rng.randrange(3, 1000) for _ in range(length)]


def continuation(scenes: Any, tokens: list[int], num_tokens: int) -> list[int]:
    """What the pretended model answers to a prompt, whatever else is going on."""
    whole = list(tokens)
    for _ in range(num_tokens):
        whole.append(scenes.next_token(whole))
    return whole[len(tokens) :]


@pytest.mark.parametrize("dcp", [1, 2, 4])
def test_case_14_an_eviction_storm_reads_nothing_of_anybody_else(scenes: Any, dcp: int) -> None:
    """CASES 14: a pool of 20 blocks and 200 multi-turn requests that need more than three times as much.

    The pretended worker checks that every block id is in range and everything that a step reads.
    """
    engine = small_engine(scenes, dcp=dcp, num_blocks=20, budget=64, max_len=14 * B)
    rng = random.Random(dcp)
    conversations = [prompt(rng.randrange(2 * B, 5 * B), seed) for seed in range(10)]
    num_blocks_asked_for = num_hit_tokens = 0
    for turn in range(200 // len(conversations)):
        order = list(range(len(conversations)))
        rng.shuffle(order)
        for number in order:
            tokens = conversations[number]
            if len(tokens) > 10 * B:
                tokens = conversations[number] = tokens[: 2 * B]
            num_blocks_asked_for += engine.worker.geometry.blocks_per_request(len(tokens))
            engine.add(f"{number}/{turn}", tokens, max_tokens=rng.randrange(1, B))
        engine.run()
        for number in order:
            name = f"{number}/{turn}"
            answer = engine.outputs[name]
            assert answer == continuation(scenes, conversations[number], len(answer))
            assert engine.hits[name] <= len(conversations[number])
            num_hit_tokens += engine.hits[name]
            conversations[number] += answer + prompt(rng.randrange(1, B), seed=1000 * turn + number)
    pool = engine.scheduler.kv_cache_manager.block_pool
    assert num_blocks_asked_for > 3 * 20 * (200 // len(conversations))
    assert num_hit_tokens > 0
    assert pool.get_num_free_blocks() == 19  # all but the null block
    assert engine.worker.num_reads_checked > 10_000


@pytest.mark.parametrize("dcp", [1, 2, 4])
def test_case_20_preempted_requests_finish_and_say_the_same(scenes: Any, dcp: int) -> None:
    """CASES 20: a pool for little more than two requests, and eight that grow while they run."""
    prompts = [prompt(3 * B + seed, seed) for seed in range(8)]
    num_tokens = 8 * B * dcp
    geometry = small_engine(scenes, dcp=dcp, num_blocks=1000).worker.geometry
    num_blocks = 2 * geometry.blocks_per_request(4 * B + num_tokens) + 4
    engine = small_engine(scenes, dcp=dcp, num_blocks=num_blocks, budget=64)
    for number, tokens in enumerate(prompts):
        engine.add(str(number), tokens, max_tokens=num_tokens)
    engine.run()
    assert engine.num_preemptions > 0
    for number, tokens in enumerate(prompts):
        assert engine.outputs[str(number)] == continuation(scenes, tokens, num_tokens)
    assert engine.scheduler.kv_cache_manager.block_pool.get_num_free_blocks() == num_blocks - 1


@pytest.mark.parametrize("dcp", [2, 4])
@pytest.mark.parametrize("budget", [B, B + 1, B * 2, B * 5 - 3])
def test_every_prompt_gets_on_however_small_the_budget(scenes: Any, budget: int, dcp: int) -> None:
    """A budget of one rank's block is all that vLLM asks for; decodes of others take tokens of it away."""
    engine = small_engine(scenes, dcp=dcp, num_blocks=400, budget=max(budget, 16))
    for number, length in enumerate((1, B - 1, B, B * dcp, B * dcp + 1, 5 * B * dcp - 1, 7 * B)):
        engine.add(str(number), prompt(length, number), max_tokens=3)
    engine.run(max_steps=2000)
    assert all(len(answer) == 3 for answer in engine.outputs.values())


@pytest.mark.parametrize("dcp", [2, 4])
def test_more_requests_fit_at_a_larger_dcp_size(scenes: Any, dcp: int) -> None:
    """The same pool runs more long requests at once: what the user asked DCP for."""

    def most_at_once(size: int) -> int:
        engine = small_engine(scenes, dcp=size, num_blocks=100, budget=2048)
        for number in range(16):
            engine.add(str(number), prompt(20 * B, number), max_tokens=2)
        engine.run()
        return max(len(chunks) for chunks in engine.worker.steps)

    assert most_at_once(dcp) > most_at_once(1)
