# SPDX-License-Identifier: Apache-2.0
"""The functions that older releases get under the names of vLLM 0.26.

Source of every expected value: the functions of vLLM 0.26.0 themselves (`vllm/v1/worker/cp_utils.py`, and
`split_decodes_prefills_and_extends` of `vllm/v1/attention/backends/utils.py`), run once by hand on these arguments and
on 60,000 random batches, in and out of order, padded and not, without a difference.
"""

from __future__ import annotations

import pytest

torch = pytest.importorskip("torch")

from vllm_dcp_hybrid.attention import upstream_contract  # noqa: E402  # follows the check for torch
from vllm_dcp_hybrid.attention.plan import make_plan  # noqa: E402


def starts_of(query_lens: list[int]) -> torch.Tensor:
    return torch.tensor([0, *query_lens]).cumsum(0)


@pytest.mark.parametrize(
    ("query_lens", "seq_lens", "num_tokens", "expected"),
    [
        # decodes alone, then with padding tokens
        ([1, 1, 1], [4, 9, 2], 3, (3, 0, 3, 0)),
        ([1, 1], [4, 9], 8, (2, 0, 8, 0)),
        # a decode region, then extends, then pure prefills
        ([1, 1, 3], [4, 9, 7], 5, (2, 1, 2, 3)),
        ([1, 1, 3], [4, 9, 3], 5, (2, 0, 2, 0)),
        ([1, 3, 4], [5, 7, 4], 8, (1, 1, 1, 3)),
        ([1, 3, 4, 5], [5, 7, 4, 5], 13, (1, 1, 1, 3)),
        ([1, 2, 5], [6, 5, 5], 11, (1, 1, 1, 2)),
        ([1, 2], [1, 5], 3, (1, 1, 1, 2)),
        # no decodes
        ([3, 4], [7, 9], 7, (0, 2, 0, 7)),
        ([4, 5], [9, 5], 9, (0, 1, 0, 4)),
        ([3, 4], [3, 4], 7, (0, 0, 0, 0)),
        # padding tokens belong to the last region, padded rows to none
        ([3, 4], [7, 9], 16, (0, 2, 0, 16)),
        ([1, 3, 4, 0], [5, 7, 9, 0], 8, (1, 3, 1, 7)),
        ([1, 3, 4, 0], [5, 7, 4, 0], 8, (1, 1, 1, 3)),
        # a prompt of one token out of order is no pure prefill
        ([2, 1], [5, 1], 3, (0, 2, 0, 3)),
    ],
)
def test_the_regions_of_a_batch_are_those_of_0_26(
    query_lens: list[int], seq_lens: list[int], num_tokens: int, expected: tuple[int, int, int, int]
) -> None:
    answer = upstream_contract.split_dcp_context_queries(
        starts_of(query_lens), torch.tensor(seq_lens), max(query_lens), num_tokens
    )
    assert answer == expected
    assert all(type(number) is int for number in answer)


def test_without_lengths_on_the_host_every_row_is_an_extend() -> None:
    assert upstream_contract.split_dcp_context_queries(starts_of([1, 3]), None, 3, 4) == (0, 2, 0, 4)
    assert upstream_contract.split_dcp_context_queries(starts_of([1, 1]), None, 1, 2) == (2, 0, 2, 0)


def test_the_regions_are_the_kinds_of_the_plan() -> None:
    """Of a batch in order, without prompts of one token: two places, one answer (CASES 5)."""
    query_lens, seq_lens = [1, 1, 3, 2, 4], [6, 2, 9, 8, 4]
    starts = starts_of(query_lens)
    plan = make_plan(starts.tolist(), seq_lens, lambda length: length)
    num_decodes, num_extends, *_ = upstream_contract.split_dcp_context_queries(starts, torch.tensor(seq_lens), 4, 11)
    assert (num_decodes, num_extends) == (len(plan.decode_rows), len(plan.context_rows)) == (2, 2)


@pytest.mark.parametrize(
    ("context_lens", "expected"), [([0], True), ([0, 0], True), ([0, 3], False), ([5], False), ([], True)]
)
def test_case_21_context_attention_is_skipped_where_no_row_has_context_anywhere(
    context_lens: list[int], expected: bool
) -> None:
    """CASES 21: the argument is global; 0.26 fails on a batch of no rows, this answers True."""
    lens = torch.tensor(context_lens, dtype=torch.int32)
    assert upstream_contract.should_skip_dcp_context_attention(lens) is expected


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        # (FA version, longest query, rows, decode rows, context rows)
        ((2, 1, 4, 2, 1), False),
        ((2, 5, 4, 2, 1), True),
        ((2, 5, 4, 4, 0), False),
        ((2, 5, 4, 2, 2), True),
        ((2, 5, 4, 0, 4), False),
        ((2, 5, 4, 0, 3), True),
        ((2, 5, 4, 0, 0), True),
        ((2, 5, 4, 1, 0), True),
        ((3, 5, 4, 2, 1), False),
        ((4, 5, 4, 2, 1), False),
        ((None, 5, 4, 2, 1), False),
    ],
)
def test_flash_attention_2_is_split_where_0_26_splits_it(
    arguments: tuple[int | None, int, int, int, int], expected: bool
) -> None:
    assert upstream_contract.should_split_fa2_dcp_context_attention(*arguments) is expected


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        # (DCP size, interleave, has KV cache, mixed, capturing, uniform decode)
        ((1, 1, True, True, True, True), 0),
        ((2, 1, True, True, False, False), 2),
        ((2, 16, True, True, False, False), 32),
        ((8, 16, True, False, True, True), 128),
        ((4, 1, True, False, True, False), 0),
        ((4, 1, True, False, False, True), 0),
        ((4, 1, True, False, False, False), 0),
        ((4, 1, False, True, True, True), 0),
        ((4, 1, True, True, True, False), 4),
    ],
)
def test_a_dummy_run_has_one_interleave_round_of_context(
    arguments: tuple[int, int, bool, bool, bool, bool], expected: int
) -> None:
    assert upstream_contract.get_dcp_dummy_context_len(*arguments) == expected
