# SPDX-License-Identifier: Apache-2.0
"""A hypothesis state machine over vLLM's real scheduler and KV cache manager, with what must hold after every rule.

What the machine knows by itself: every sequence's tokens, and how many of them were computed since the cache was
reset.  The pretended worker of `hybrid_scenes` adds what blocks hold: a step that reads a position or a state of
another prefix, or of another length, stops the machine.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from hypothesis import reject
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

BLOCK = 4
MAX_LEN = 96
HEAD_SIZE = 64


@dataclass(frozen=True)
class Mix:
    """KV cache groups of an engine, in the order in which vLLM makes them.

    Attributes:
        kind: of the tiny model whose configuration the engine has.
        num_recurrent, num_attention: groups.
        mode: ``mamba_cache_mode``; without prefix caching where it is ``none``.
    """

    kind: str
    num_recurrent: int
    num_attention: int = 1
    mode: str = "align"

    def specs(self, scenes: Any) -> list[Any]:
        state_block = BLOCK if self.mode == "align" else MAX_LEN
        recurrent = [scenes.recurrent_spec(state_block, self.mode) for _ in range(self.num_recurrent)]
        return recurrent + [scenes.attention_spec(BLOCK, head_size=HEAD_SIZE) for _ in range(self.num_attention)]


MIXES = {
    "recurrent": Mix("qwen3-next", 3),
    "recurrent, not cached": Mix("qwen3-next", 2, mode="none"),
    "several of both": Mix("qwen3-next", 2, num_attention=2),
    "short convolution": Mix("lfm2", 1),
    "attention": Mix("llama", 0),
}


def common_length(one: Sequence[int], other: Sequence[int]) -> int:
    """Tokens with which both begin."""
    return next((k for k, (a, b) in enumerate(zip(one, other, strict=False)) if a != b), min(len(one), len(other)))


class SchedulingMachine(RuleBasedStateMachine):
    """Requests come, run, stop and are preempted in any order, over one pool that is too small for them.

    Args:
        scenes: the module `hybrid_scenes`.
        mix: KV cache groups.
        dcp: DCP size.
        seen: counts what happened, over all examples.
    """

    def __init__(self, scenes: Any, mix: Mix, dcp: int, seen: Counter[str]) -> None:
        super().__init__()
        self.scenes, self.mix, self.dcp, self.seen = scenes, mix, dcp, seen
        # Prompts to branch off from, and what was computed: tokens by sequence, since the last reset.
        self.prompts: list[list[int]] = []
        self.computed: dict[str, list[int]] = {}
        self.num_requests = 0
        # After a fault of stock that is known: the example ends.
        self.is_over = False

    @initialize(
        spare=st.integers(0, 40),
        budget=st.sampled_from([BLOCK, BLOCK + 1, 3 * BLOCK - 1, 8 * BLOCK, 2 * MAX_LEN]),
        interleave=st.sampled_from([1, 2, BLOCK]),
    )
    def start(self, spare: int, budget: int, interleave: int) -> None:
        config = self.scenes.engine_config(
            dcp=self.dcp,
            kind=self.mix.kind,
            mode=self.mix.mode,
            block_size=BLOCK,
            max_len=MAX_LEN,
            interleave=interleave,
        )
        config.scheduler_config.max_num_batched_tokens = budget
        groups = self.scenes.cache_config(self.mix.specs(self.scenes))
        self.geometry = self.scenes.adapter.cache_geometry(groups, config)
        # At least one request of the full length fits beside the null block.
        self.num_blocks = 1 + self.geometry.blocks_per_request(MAX_LEN) + spare
        config.cache_config.num_gpu_blocks = groups.num_blocks = self.num_blocks
        self.engine = self.scenes.Engine(config, groups)
        self.manager = self.engine.scheduler.kv_cache_manager

    @rule(
        branch=st.integers(0, 5),
        kept=st.integers(0, MAX_LEN),
        tail=st.integers(1, 3 * BLOCK),
        max_tokens=st.sampled_from([1, 2, BLOCK, 5 * BLOCK]),
        seed=st.integers(0, 2),
    )
    def add(self, branch: int, kept: int, tail: int, max_tokens: int, seed: int) -> None:
        """A new prompt, or one that begins as an earlier sequence does and ends in a tail of few different tokens."""
        room = MAX_LEN - max_tokens
        rng = random.Random(f"{seed}/{tail}")
        fresh = [rng.randrange(3, 5) for _ in range(room)]
        begin = self.prompts[-1 - branch % len(self.prompts)] if self.prompts else fresh
        prompt = [*begin[: min(kept, room - tail)], *fresh[:tail]]
        name = f"r{self.num_requests}"
        self.num_requests += 1
        self.prompts.append(prompt)
        self.engine.add(name, prompt, max_tokens)

    @rule(
        branch=st.integers(0, 5),
        kept=st.lists(st.integers(0, MAX_LEN), min_size=2, max_size=4),
        tail=st.integers(1, 2 * BLOCK),
    )
    def add_a_burst(self, branch: int, kept: list[int], tail: int) -> None:
        for number, length in enumerate(kept):
            self.add(branch + number, length, tail, BLOCK, seed=number)

    @rule(num_steps=st.integers(1, 6))
    def run(self, num_steps: int) -> None:
        for _ in range(num_steps):
            self.step()

    @rule(num_steps=st.integers(4, 20))
    def run_long(self, num_steps: int) -> None:
        self.run(num_steps)

    def step(self) -> None:
        """One step of the engine; every hit is held against all that was computed before or beside it."""
        requests = dict(self.engine.scheduler.requests)
        tokens = {name: list(request.all_token_ids) for name, request in requests.items()}
        running_before = {request.request_id for request in self.engine.scheduler.running}
        own_before = dict(self.computed)
        try:
            self.engine.step()
        except self.scenes.CopyOfUnwrittenBlock:
            self.is_over = True
            self.seen["copies of unwritten blocks"] += 1
            reject()
        chunks = self.engine.worker.steps[-1]
        for name, (_, end) in chunks.items():
            self.computed[name] = max(tokens[name][:end], own_before.get(name, []), key=len)
        for name, (start, end) in chunks.items():
            assert start < end <= MAX_LEN
            is_admitted = name not in running_before or name in self.preempted_and_resumed(name, start)
            if is_admitted and start:
                others = [own_before.get(name, []), *(self.computed[other] for other in self.computed if other != name)]
                longest = max(common_length(tokens[name], other) for other in others)
                assert start <= min(longest, len(tokens[name]) - 1), f"{name}: hit {start}, common {longest}"
                assert start % min(self.geometry.effective_block_sizes) == 0
                self.seen["hits"] += 1
        for request in requests.values():
            if request.is_finished():
                self.prompts.append(list(request.all_token_ids))
        self.seen["steps"] += 1

    def preempted_and_resumed(self, name: str, start: int) -> set[str]:
        """A request that was preempted and came back in one step starts before the end of its last chunk."""
        earlier = [chunks[name][1] for chunks in self.engine.worker.steps[:-1] if name in chunks]
        return {name} if earlier and start < earlier[-1] else set()

    @rule(
        what=st.sampled_from(["abort", "abort", "abort", "evict", "evict", "evict", "reset", "start again"]),
        number=st.integers(0, 7),
    )
    def disturb(self, what: str, number: int) -> None:
        scheduler = self.engine.scheduler
        if what == "abort" and scheduler.requests:
            # The user hangs up: waiting, in the middle of a prompt, or generating.
            names = list(scheduler.requests)
            scheduler.finish_requests([names[number % len(names)]], self.scenes.RequestStatus.FINISHED_ABORTED)
            self.seen["aborts"] += 1
        elif what == "evict":
            # The cache forgets blocks, whoever uses them.
            self.manager.evict_blocks(set(range(1 + number, self.num_blocks, 5)))
            self.seen["evictions"] += 1
        elif what in ("reset", "start again") and scheduler.reset_prefix_cache(what == "start again"):
            # The cache is emptied; where running requests start again, under them too.
            self.computed.clear()
            self.seen["resets"] += 1

    @invariant()
    def every_block_belongs_to_one_sequence_or_to_a_common_prefix(self) -> None:
        users: dict[int, list[tuple[str, int, int]]] = {}
        for name, rows in self.rows():
            for number, row in enumerate(rows):
                for column, block in enumerate(row):
                    if block:
                        users.setdefault(block, []).append((name, number, column))
        requests = self.engine.scheduler.requests
        for block, places in users.items():
            (first, group, column), *others = places
            end = (column + 1) * self.geometry.groups[group].effective_block_size
            for other, other_group, other_column in others:
                assert other != first, f"{first} has block {block} twice"
                assert (other_group, other_column) == (group, column), f"block {block} is in two places: {places}"
                one, two = (requests[name].all_token_ids[:end] for name in (first, other))
                assert list(one) == list(two), f"block {block} is shared by {first} and {other}, which differ"
                self.seen["shared blocks"] += 1

    @invariant()
    def rows_are_as_long_as_the_geometry_says(self) -> None:
        for name, rows in self.rows():
            length = self.engine.scheduler.requests[name].num_computed_tokens
            for row, group in zip(rows, self.geometry.groups, strict=True):
                assert len(row) == group.num_blocks(length), f"{name}: {length} tokens"
                held = sum(block != 0 for block in row)
                if group.is_recurrent:
                    assert held <= group.resident_blocks(MAX_LEN), f"{name}: {held} states"
                    assert row[-1], f"{name}: no running state"
                else:
                    assert held == len(row), f"{name}: a null block among {row}"

    @invariant()
    def blocks_are_free_or_counted_once_for_each_user(self) -> None:
        uses = Counter(block for _, rows in self.rows() for row in rows for block in row if block)
        pool = self.manager.block_pool
        assert pool.get_num_free_blocks() == self.num_blocks - 1 - len(uses)
        assert {block.block_id: block.ref_cnt for block in pool.blocks[1:] if block.ref_cnt} == uses

    def rows(self) -> Iterable[tuple[str, tuple[list[int], ...]]]:
        """Block ids per group of every request that has any."""
        for name in self.engine.scheduler.requests:
            rows = self.manager.get_block_ids(name)
            if any(rows):
                yield name, rows

    def teardown(self) -> None:
        """Every request comes to its end, and every block comes back."""
        if self.is_over or not hasattr(self, "engine"):
            return
        for _ in range(100 * (1 + self.num_requests)):
            if not self.engine.scheduler.has_unfinished_requests():
                break
            self.step()
            self.check_invariants_now()
        assert not self.engine.scheduler.requests
        assert self.manager.block_pool.get_num_free_blocks() == self.num_blocks - 1
        assert self.engine.scheduler.reset_prefix_cache()
        self.seen["preemptions"] += self.engine.num_preemptions
        self.seen["reads"] += self.engine.worker.num_reads_checked

    def check_invariants_now(self) -> None:
        self.every_block_belongs_to_one_sequence_or_to_a_common_prefix()
        self.rows_are_as_long_as_the_geometry_says()
        self.blocks_are_free_or_counted_once_for_each_user()
