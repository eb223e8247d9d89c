# SPDX-License-Identifier: Apache-2.0
"""What `verify` asks: prompts whose lengths meet every edge of a sharded KV cache."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass

from vllm_dcp_hybrid import placement

NUM_DECODED = 64
NUM_AFTER_PREFIX = 24


@dataclass(frozen=True)
class Probe:
    """One prompt twice, the second time with some tokens of its first half exchanged.

    Attributes:
        intact, damaged: token ids, equal from `first_scored` on.
        first_scored: index of the first token of the second half.
    """

    intact: list[int]
    damaged: list[int]
    first_scored: int


@dataclass(frozen=True)
class Work:
    """The prompts, as token ids.

    Attributes:
        scored: their own tokens get log-probabilities: prefill, in chunks where they are longer than one.
        decoded: they are continued by `NUM_DECODED` tokens in one batch, and once more with what is in the cache.
        prefix: put into the cache alone.
        tails: prompts that begin with `prefix`.
        probe: what a fault would do to this model.
    """

    scored: list[list[int]]
    decoded: list[list[int]]
    prefix: list[int]
    tails: list[list[int]]
    probe: Probe


@dataclass(frozen=True)
class Edges:
    """The lengths at which something changes.

    Attributes:
        effective_block: tokens of the sequence under one block id.
        chunk: longest piece of a prompt that one step computes.
        max_model_len: longest sequence.
        dcp_world_size: ranks that share out the tokens.
        interleave_size: consecutive tokens of one rank.
    """

    effective_block: int
    chunk: int
    max_model_len: int
    dcp_world_size: int
    interleave_size: int


def make_work(words: Sequence[int], edges: Edges, seed: int = 0) -> Work:
    """All prompts, made of `words`; lengths beyond the longest sequence are cut to it."""
    source = random.Random(seed)
    longest = edges.max_model_len - NUM_DECODED - 1

    def prompts(lengths: Sequence[int]) -> list[list[int]]:
        return [_prompt(source, words, length) for length in _within(lengths, longest)]

    block, half = edges.effective_block, edges.effective_block // 2
    # A round of the interleave: the ranks after the first have no token yet, then all have one.
    one_round = placement.global_pos(edges.interleave_size, 0, edges.dcp_world_size, edges.interleave_size)
    scored = prompts(
        [
            *(1, 2, edges.interleave_size, one_round + 1),
            *(block - 1, block, block + 1, 2 * block + half + 3, 3 * block + 5),
            edges.chunk + edges.chunk // 2 + 17,
        ]
    )
    # The third answer crosses an effective block.
    decoded = prompts([1, 3, block - NUM_DECODED // 2, block + half, 2 * block + 1, 3 * block - 7])
    prefix = _prompt(source, words, max(1, min(2 * block + 5, longest - block)))
    tails = [[*prefix, *_prompt(source, words, length)] for length in _within([1, 7, half + 2], longest - len(prefix))]
    return Work(scored, decoded, prefix, tails, _probe(source, words, max(scored, key=len), edges))


def _within(lengths: Sequence[int], longest: int) -> list[int]:
    return sorted({max(1, min(length, longest)) for length in lengths})


def _prompt(source: random.Random, words: Sequence[int], length: int) -> list[int]:
    """Random words.  The last eighth repeats one of the first half, which a trained model notices if it reads it."""
    tokens = source.choices(words, k=length)
    eighth = length // 8
    if eighth:
        start = source.randrange(length // 2 - eighth + 1)
        tokens[-eighth:] = tokens[start : start + eighth]
    return tokens


def _probe(source: random.Random, words: Sequence[int], prompt: list[int], edges: Edges) -> Probe:
    """The tokens of the last rank's share of the first half are exchanged."""
    half = len(prompt) // 2
    last = edges.dcp_world_size - 1

    def is_lost(place: int) -> bool:
        return place < half and placement.owner(place, edges.dcp_world_size, edges.interleave_size) == last

    damaged = [source.choice(words) if is_lost(place) else token for place, token in enumerate(prompt)]
    return Probe(prompt, damaged, half)
