# SPDX-License-Identifier: Apache-2.0
"""GroupGeometry: what follows from where a group's tokens live."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from vllm_dcp_hybrid.geometry import CacheGeometry, GroupGeometry, common_geometry
from vllm_dcp_hybrid.placement import Placement

B = 16


def attention(n: int = 2, block_size: int = B, interleave_size: int = 1) -> GroupGeometry:
    return GroupGeometry(
        placement=Placement.SHARDED, block_size=block_size, dcp_world_size=n, interleave_size=interleave_size
    )


def recurrent(n: int = 2, block_size: int = B, mode: str = "align", spec: int = 0) -> GroupGeometry:
    return GroupGeometry(
        placement=Placement.REPLICATED,
        block_size=block_size,
        dcp_world_size=n,
        recurrent_mode=mode,
        num_speculative_blocks=spec,
    )


def test_case_01_recurrent_blocks_are_not_scaled() -> None:
    """CASES 1: {attention B=16, recurrent M=16}, N=2, 64 tokens: 2 blocks and 4 blocks."""
    assert attention().num_blocks(64) == 2
    assert recurrent().num_blocks(64) == 4


@pytest.mark.parametrize("n", [2, 4, 8])
@pytest.mark.parametrize("spec", [0, 1, 3])
def test_case_02_recurrent_rows_cover_the_whole_sequence(n: int, spec: int) -> None:
    """CASES 2: widths for max_len in {B*N, B*N+1, 10^6}; speculative blocks added after."""
    for max_len, blocks in ((B * n, n), (B * n + 1, n + 1), (10**6, 62500)):
        assert recurrent(n, spec=spec).table_width(max_len) == blocks + spec
        assert recurrent(n, spec=spec, mode="all").table_width(max_len) == blocks + spec
        assert recurrent(n, spec=spec, mode="none").table_width(max_len) == 1 + spec
    for max_len, blocks in ((B * n, 1), (B * n + 1, 2)):
        assert attention(n).table_width(max_len) == blocks


@pytest.mark.parametrize("n", [1, 2, 4])
def test_case_03_effective_block_is_scaled_exactly_once(n: int) -> None:
    """CASES 3."""
    assert attention(n).effective_block_size == B * n
    assert recurrent(n).effective_block_size == B


def test_recurrent_state_cannot_be_sharded() -> None:
    with pytest.raises(ValueError, match="cannot be sharded"):
        GroupGeometry(placement=Placement.SHARDED, block_size=B, dcp_world_size=2, recurrent_mode="align")


def test_interleave_must_divide_the_block() -> None:
    with pytest.raises(ValueError, match="multiple of interleave_size"):
        attention(interleave_size=3)


def test_only_single_tokens_have_slots() -> None:
    assert attention().uses_slot_mapping
    assert not recurrent().uses_slot_mapping
    assert not GroupGeometry(placement=Placement.NONE, block_size=B).uses_slot_mapping


@pytest.mark.parametrize(
    ("groups", "scheduler", "hash_unit"),
    [
        # the examples of TARGETS 5.4
        ([attention(2, 272), recurrent(2, 272)], 544, 272),
        ([attention(2, 272), recurrent(2, 8192, "none")], 139264, 32),
        ([attention(4, 528), recurrent(4, 528)], 2112, 528),
        ([attention(1, 272), recurrent(1, 272)], 272, 272),
    ],
)
def test_scheduler_block_and_hash_unit(groups: list[GroupGeometry], scheduler: int, hash_unit: int) -> None:
    geometry = common_geometry(groups)
    assert geometry.scheduler_block_size == scheduler
    assert geometry.hash_block_size == hash_unit


@given(
    block=st.integers(1, 600),
    n=st.sampled_from([1, 2, 3, 4, 8]),
    recurrent_block=st.integers(1, 600),
    length=st.integers(0, 20_000),
)
def test_scheduler_block_holds_whole_blocks_of_every_group(
    block: int, n: int, recurrent_block: int, length: int
) -> None:
    geometry = common_geometry([attention(n, block), recurrent(n, recurrent_block)])
    for group in geometry.groups:
        assert geometry.scheduler_block_size % group.effective_block_size == 0
        assert group.effective_block_size % geometry.hash_block_size == 0
        # Blocks cover the sequence, and one block fewer does not.
        blocks = group.num_blocks(length)
        assert blocks * group.effective_block_size >= length > (blocks - 1) * group.effective_block_size


@given(length=st.integers(0, 5000), n=st.sampled_from([1, 2, 4, 8]), runs=st.integers(1, 8))
def test_no_rank_stores_more_than_its_blocks_hold(length: int, n: int, runs: int) -> None:
    group = attention(n, 48 * runs, 48)
    for rank in range(n):
        assert group.local_len(length, rank) <= group.num_blocks(length) * group.block_size
    assert sum(group.local_len(length, rank) for rank in range(n)) == length


def test_groups_must_agree_on_the_dcp_size() -> None:
    with pytest.raises(ValueError, match="agree"):
        common_geometry([attention(2), recurrent(4)])


def test_case_09_capacity_grows_with_n_and_bytes_shrink() -> None:
    """CASES 9: tokens that fit at N = 2 are more than at N = 1; attention bytes per token and rank are 1/N."""

    def engine(n: int) -> CacheGeometry:
        page = {"page_size_bytes": 4096, "num_layers": 2}
        one = GroupGeometry(placement=Placement.SHARDED, block_size=B, dcp_world_size=n, **page)
        state = GroupGeometry(
            placement=Placement.REPLICATED, block_size=B, dcp_world_size=n, recurrent_mode="align", **page
        )
        return common_geometry([one, state])

    assert engine(2).kv_token_capacity(1000, 4096) > engine(1).kv_token_capacity(1000, 4096)
    assert engine(2).bytes_per_token() * 2 == engine(1).bytes_per_token() == 2 * 4096 / B
    assert engine(2).state_bytes_per_request(4096) == engine(1).state_bytes_per_request(4096)
