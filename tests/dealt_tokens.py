# SPDX-License-Identifier: Apache-2.0
"""Random geometries, and what is true of each by dealing tokens out one at a time, without a division.

A case is made from its number alone, so that a failure can be looked at again: ``make_case(4711)``.
"""

from __future__ import annotations

import functools
import random
from dataclasses import dataclass, field
from itertools import islice

from vllm_dcp_hybrid.placement import Placement

LONGEST = 5_000
_KERNEL_BLOCKS = (1, 2, 3, 4, 6, 8, 16)
_BLOCKS_OF_ENGINES = ((272, 16), (528, 16), (128, 64), (64, 16), (128, 128))


@dataclass(frozen=True, slots=True)
class Case:
    """A KV cache group of attention and a step's requests.

    Attributes:
        requests: (context length, new tokens) of each; no new tokens is a padded row.
        rows: ids of kernel blocks of each request, in the order of the sequence.
        num_padding: entries of the slot mapping behind the last token.
        rank: one of the ranks, for what is too slow to check on all.
    """

    number: int
    placement: Placement
    block_size: int
    kernel_block_size: int
    interleave_size: int
    dcp_world_size: int
    rank: int
    num_padding: int
    requests: list[tuple[int, int]] = field(default_factory=list)
    rows: list[list[int]] = field(default_factory=list)

    @property
    def is_sharded(self) -> bool:
        return self.placement is Placement.SHARDED

    @property
    def num_shards(self) -> int:
        return self.dcp_world_size if self.is_sharded else 1

    def deal(self) -> Deal:
        return deal(self.num_shards, self.interleave_size if self.is_sharded else 1)

    def seq_lens(self) -> list[int]:
        """Global lengths with the new tokens; padded rows have 0."""
        return [context + new if new else 0 for context, new in self.requests]

    def query_start_loc(self) -> list[int]:
        starts = [0]
        for _, new in self.requests:
            starts.append(starts[-1] + new)
        return starts

    def positions(self) -> list[int]:
        return [context + token for context, new in self.requests for token in range(new)]


@dataclass(frozen=True)
class Deal:
    """The first `LONGEST` tokens of a sequence, dealt out.

    Attributes:
        owners: rank of each token.
        places: index of each token among those of its owner.
        lengths: ``lengths[rank][k]`` of the first k tokens are the rank's.
    """

    owners: list[int]
    places: list[int]
    lengths: list[list[int]]


@functools.cache
def deal(num_ranks: int, interleave_size: int) -> Deal:
    """Turn by turn: a rank takes `interleave_size` tokens, then the next rank does."""
    owners: list[int] = []
    places: list[int] = []
    lengths = [[0] for _ in range(num_ranks)]
    rank = left = 0
    left = interleave_size
    for _ in range(LONGEST):
        if left == 0:
            rank, left = rank + 1, interleave_size
            if rank == num_ranks:
                rank = 0
        left -= 1
        owners.append(rank)
        places.append(lengths[rank][-1])
        for other, counts in enumerate(lengths):
            counts.append(counts[-1] + (other == rank))
    return Deal(owners, places, lengths)


@functools.cache
def opened_blocks(num_ranks: int, interleave_size: int, block_size: int) -> list[int]:
    """Entry k: the most blocks that any rank has begun when k tokens are dealt out; a full block is left behind."""
    begun, used, most = [0] * num_ranks, [block_size] * num_ranks, [0]
    for rank in islice(deal(num_ranks, interleave_size).owners, LONGEST):
        if used[rank] == block_size:
            begun[rank], used[rank] = begun[rank] + 1, 0
        used[rank] += 1
        most.append(max(most[-1], begun[rank]))
    return most


@functools.cache
def _divisors(size: int) -> tuple[int, ...]:
    return tuple(number for number in range(1, size + 1) if size % number == 0)


def make_case(number: int) -> Case:
    """Small blocks mostly, so that every edge is met often; one case in 32 has blocks of real engines."""
    rng = random.Random(number)
    pick, draw = rng.choice, rng.randrange
    if draw(32):
        kernel_block_size = pick(_KERNEL_BLOCKS)
        block_size = kernel_block_size * (1 + draw(4))
    else:
        block_size, kernel_block_size = pick(_BLOCKS_OF_ENGINES)
    n = pick((1, 2, 2, 3, 4, 5, 8))
    is_sharded = draw(8) > 0
    turn = block_size * n
    requests = []
    for _ in range(draw(5)):
        # Contexts on the edge of a block of the whole group, or anywhere.
        context = draw(4) * turn + draw(3) - 1 if draw(2) else draw(1 + 3 * turn)
        requests.append((min(max(context, 0), LONGEST - 12), pick((0, 1, 1, 2, 3, 5, 12))))
    case = Case(
        number=number,
        placement=Placement.SHARDED if is_sharded else Placement.REPLICATED,
        block_size=block_size,
        kernel_block_size=kernel_block_size,
        interleave_size=pick(_divisors(block_size)),
        dcp_world_size=n,
        rank=draw(n),
        num_padding=draw(4),
        requests=requests,
    )
    _fill_rows(case, rng)
    return case


def _fill_rows(case: Case, rng: random.Random) -> None:
    """As many kernel blocks as the longest request needs, with ids in no order, none of them twice."""
    longest = max((context + new for context, new in case.requests), default=1)
    interleave = case.interleave_size if case.is_sharded else 1
    num_blocks = opened_blocks(case.num_shards, interleave, case.block_size)[longest]
    width = num_blocks * (case.block_size // case.kernel_block_size)
    first = rng.randrange(1, 1000)
    # An odd step walks through all residues of a power of two: distinct ids without the price of a sample.
    size, step = 1 << (width * len(case.requests)).bit_length(), 2 * rng.randrange(500) + 1
    ids = iter(range(size))
    for _ in case.requests:
        case.rows.append([first + (next(ids) * step & size - 1) for _ in range(width)])


def expected_slots(case: Case, rank: int, pad: int) -> list[int]:
    """The slots of a step's tokens: local token k of a row lies in the row's k-th slot."""
    dealt = case.deal()
    size = case.kernel_block_size
    shard = rank if case.is_sharded else 0
    slots: list[int] = []
    for (context, new), row in zip(case.requests, case.rows, strict=True):
        if not new:
            continue
        row_slots = [block * size + offset for block in row for offset in range(size)]
        for position in range(context, context + new):
            is_own = dealt.owners[position] == shard
            slots.append(row_slots[dealt.places[position]] if is_own else pad)
    return slots + [pad] * case.num_padding
