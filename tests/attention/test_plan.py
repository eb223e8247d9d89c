# SPDX-License-Identifier: Apache-2.0
"""The plan of one step."""

from __future__ import annotations

from functools import partial
from itertools import accumulate

import pytest
from hypothesis import given
from hypothesis import strategies as st

from vllm_dcp_hybrid.attention.plan import AttentionPlan, Row, make_plan
from vllm_dcp_hybrid.placement import local_len, owner

# (context, new tokens) of each request; no new tokens is a padded row.
batches = st.lists(st.tuples(st.integers(0, 200), st.integers(0, 9)), max_size=12)


def plan_of(batch: list[tuple[int, int]], rank: int = 0, n: int = 1, i: int = 1) -> AttentionPlan:
    starts = [0, *accumulate(query for _, query in batch)]
    # A padded row has length 0, whatever its context says.
    seq_lens = [context + query if query else 0 for context, query in batch]
    return make_plan(starts, seq_lens, partial(local_len, rank=rank, n=n, i=i))


def kinds(plan: AttentionPlan) -> dict[str, list[tuple[int, int, int, int]]]:
    """The plan without what only one rank knows."""
    return {
        name: [(row.req, row.start, row.end, row.context_len) for row in getattr(plan, name)]
        for name in ("decode_rows", "context_rows", "prefill_rows")
    }


@given(batch=batches, n=st.integers(1, 5), i=st.sampled_from([1, 2, 16]))
def test_every_row_is_of_the_one_kind_that_its_lengths_say(batch: list[tuple[int, int]], n: int, i: int) -> None:
    """Against the definition, one request at a time, with owners counted token by token."""
    for rank in range(n):
        plan = plan_of(batch, rank, n, i)
        found = {row.req: (name, row) for name in kinds(plan) for row in getattr(plan, name)}
        assert len(found) == sum(len(rows) for rows in kinds(plan).values())
        token = 0
        for req, (context, query) in enumerate(batch):
            start, token = token, token + query
            if query == 0:
                assert req not in found
                continue
            name, row = found[req]
            assert (row.start, row.end, row.context_len, row.query_len) == (start, token, context, query)
            if context == 0:
                expected, num_seen = "prefill_rows", 0
            elif query == 1:
                # The new token is in the cache of its owner already.
                expected, num_seen = "decode_rows", context + 1
            else:
                expected, num_seen = "context_rows", context
            assert name == expected
            assert row.local_kv_len == sum(owner(position, n, i) == rank for position in range(num_seen))


@given(batch=batches, n=st.integers(1, 5), i=st.sampled_from([1, 2, 16, 272]))
def test_case_21_all_ranks_have_the_same_rows_and_take_part_in_the_same_exchange(
    batch: list[tuple[int, int]], n: int, i: int
) -> None:
    """CASES 21: contexts shorter than one interleave round leave ranks with nothing; they still take part."""
    plans = [plan_of(batch, rank, n, i) for rank in range(n)]
    assert all(kinds(plan) == kinds(plans[0]) for plan in plans)
    assert len({plan.needs_exchange for plan in plans}) == 1
    shapes = [[(row.start, row.end) for row in plan.exchange_rows] for plan in plans]
    assert all(shape == shapes[0] for shape in shapes)


def test_case_21_a_rank_without_a_token_still_exchanges() -> None:
    """CASES 21: one token of context and I = 16: rank 1 of 2 has none of it."""
    plan = plan_of([(1, 1)], rank=1, n=2, i=16)
    assert plan.needs_exchange
    assert plan.decode_rows == (Row(req=0, start=0, end=1, context_len=1, local_kv_len=0),)


@given(batch=batches)
def test_the_exchange_is_needed_exactly_where_some_row_has_context(batch: list[tuple[int, int]]) -> None:
    assert plan_of(batch).needs_exchange is any(context and query for context, query in batch)


@given(batch=batches)
def test_exchanged_rows_are_packed_decodes_first_in_batch_order(batch: list[tuple[int, int]]) -> None:
    plan = plan_of(batch)
    assert plan.exchange_rows == plan.decode_rows + plan.context_rows
    for rows in (plan.decode_rows, plan.context_rows, plan.prefill_rows):
        assert [row.req for row in rows] == sorted(row.req for row in rows)


@pytest.mark.parametrize("num_padded_rows", [1, 5])
def test_case_18_padded_rows_are_in_no_kind(num_padded_rows: int) -> None:
    """CASES 18: rows of a padded graph have no new tokens, and their lengths are 0 or stale."""
    starts = [0, 1, 4] + [4] * num_padded_rows
    for stale in (0, 7):
        plan = make_plan(starts, [9, 3] + [stale] * num_padded_rows, lambda length: length)
        assert [row.req for row in plan.exchange_rows + plan.prefill_rows] == [0, 1]


def test_case_18_a_batch_of_padding_only_is_an_empty_plan() -> None:
    """CASES 18."""
    plan = make_plan([0, 0, 0], [0, 0], lambda length: length)
    assert plan == AttentionPlan((), (), ())
    assert not plan.needs_exchange


def test_more_lengths_than_requests_are_ignored() -> None:
    assert make_plan([0, 2], [2, 99, 99], lambda length: length).prefill_rows == (Row(0, 0, 2, 0, 0),)


@pytest.mark.parametrize(("length", "expected"), [(8, 4), (9, 4), (10, 5)])
def test_case_22_a_decode_row_counts_its_own_token(length: int, expected: int) -> None:
    """CASES 22: N=2, rank 1, I=1: global 8, 9, 10 is 4, 4, 5."""
    (row,) = plan_of([(length - 1, 1)], rank=1, n=2, i=1).decode_rows
    assert row.local_kv_len == expected
