# SPDX-License-Identifier: Apache-2.0
"""The owner rule against brute force."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from vllm_dcp_hybrid import placement

sizes = st.integers(1, 8)
interleaves = st.integers(1, 40)
lengths = st.integers(0, 700)


def deal(length: int, n: int, i: int) -> list[list[int]]:
    """Tokens of each rank, dealt out one run at a time."""
    ranks: list[list[int]] = [[] for _ in range(n)]
    for pos in range(length):
        ranks[(pos // i) % n].append(pos)
    return ranks


@given(lengths, sizes, interleaves)
def test_every_token_has_one_owner_and_a_dense_local_position(length: int, n: int, i: int) -> None:
    for rank, tokens in enumerate(deal(length, n, i)):
        for local, pos in enumerate(tokens):
            assert placement.owner(pos, n, i) == rank
            assert placement.local_pos(pos, n, i) == local
            assert placement.global_pos(local, rank, n, i) == pos


@given(lengths, sizes, interleaves)
def test_local_lengths_are_those_of_the_dealt_out_tokens(length: int, n: int, i: int) -> None:
    dealt = [len(tokens) for tokens in deal(length, n, i)]
    assert [placement.local_len(length, rank, n, i) for rank in range(n)] == dealt
    assert placement.max_local_len(length, n, i) == max(dealt)


def test_case_22_local_length_of_earlier_draft_rows_is_not_the_last_ones_minus_k() -> None:
    """CASES 22: N=2, rank 1, I=1, global 8, 9, 10 is 4, 4, 5."""
    assert [placement.local_len(length, 1, 2, 1) for length in (8, 9, 10)] == [4, 4, 5]


def test_one_rank_owns_everything() -> None:
    assert [placement.local_len(length, 0, 1, 16) for length in (0, 1, 15, 16, 17)] == [0, 1, 15, 16, 17]


@pytest.mark.parametrize(
    ("tp", "kv_heads", "query_heads", "largest"),
    [
        (2, 1, 8, 2),
        (4, 2, 8, 2),
        (4, 1, 8, 4),
        (8, 2, 16, 4),
        (4, 1, 6, 2),  # six query heads share the KV head: 4 does not divide them, 2 does
        (6, 2, 12, 3),
        (8, 3, 24, 2),  # each head is on two ranks
        (5, 2, 16, 1),  # two copies of each head, but 2 does not divide 5
        (6, 2, 4, 1),  # three ranks store the same KV head: groups of two would straddle heads
        (4, 4, 8, 1),
        (2, 8, 8, 1),
    ],
)
def test_case_07_largest_legal_size(tp: int, kv_heads: int, query_heads: int, largest: int) -> None:
    """CASES 7."""
    assert placement.largest_dcp_world_size(tp, kv_heads, query_heads) == largest


def test_mla_may_split_over_all_ranks() -> None:
    assert placement.largest_dcp_world_size(8, 128, 128, is_mla=True) == 8
